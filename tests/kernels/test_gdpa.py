"""The jagged attention kernels in Triton's interpreter, against a per-sequence loop in fp64, and compiled for every
declared architecture. Larger cases and two identical runs are in tests/gpu/test_gdpa.py."""

import pytest
import torch
from attention_cases import LENGTHS, Problem, check

from recsys_norm.kernels.compile import declared_architectures, run_checks
from recsys_norm.kernels.gdpa import launch
from recsys_norm.ops.activations import ACTIVATIONS, resolve
from recsys_norm.ops.jagged_attention import _launch_spec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels on the GPU")


def run_kernels(p, splits=None):
    """(o, dq, dk, dv) by the kernels, on CPU tensors."""
    o = dict(activation="gelu", scale=1.0, causal=False, window=None) | p.options
    names = ",".join(resolve(o["activation"], p.heads))
    spec = _launch_spec(p.heads, *p.lengths.values(), names, o["scale"], o["causal"], o["window"])
    return (launch.forward(*p.arguments, spec), *launch.backward(p.grad, *p.arguments, spec, splits=splits))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a4_a5_lengths_and_slack(lengths):
    resident = Problem(*LENGTHS[lengths], heads=1, dtype=torch.float16, slack=3)
    check(resident, run_kernels(resident))
    streamed = Problem(*LENGTHS[lengths], heads=1, slack=3, offsets_dtype=torch.int64)  # fp32 always streams its keys
    check(streamed, run_kernels(streamed))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, ("silu", "relu2", "relu2")])
def test_activations(activation):
    heads = 3 if isinstance(activation, tuple) else 1
    for dtype in (torch.bfloat16, torch.float32):
        p = Problem([20, 3], [5, 11], heads=heads, dtype=dtype, options=dict(activation=activation, scale=0.8))
        check(p, run_kernels(p))


@pytest.mark.parametrize("causal,window", [(True, None), (False, 3), (True, 40)])
def test_causal_and_window(causal, window):
    for q_len, k_len in (([70, 4], [70, 4]), ([90, 5], [150, 2])):  # keys held on chip, keys streamed
        p = Problem(q_len, k_len, heads=1, dtype=torch.float16, slack=1, options=dict(causal=causal, window=window))
        check(p, run_kernels(p))


@pytest.mark.parametrize("d,dtype", [(1, torch.float32), (17, torch.float16), (24, torch.float16), (96, torch.float16)])
def test_a8_widths_that_are_not_powers_of_two(d, dtype):
    p = Problem([33, 2], [40, 3], heads=2, d=d, dtype=dtype, options=dict(scale=0.3))
    check(p, run_kernels(p))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_long_sequence_split_over_programs(splits):
    p = Problem([300, 1, 70], [64, 3, 128], heads=1, dtype=torch.float16, slack=5, options=dict(scale=0.1))
    check(p, run_kernels(p, splits=splits))


def test_a7_slices_of_a_fused_projection():
    p = Problem([20, 7], [20, 7], dtype=torch.float16, d=24)
    expected = run_kernels(p)
    fused = torch.stack([p.q, p.k, p.v, p.grad], 1)
    p.q, p.k, p.v, p.grad = fused.unbind(1)
    for actual, right in zip(run_kernels(p), expected):
        assert torch.equal(actual, right)
    p.grad = torch.ones(1, 1, 24, dtype=p.dtype).expand(27, 2, 24)
    check(p, run_kernels(p))


def test_a_maximum_that_is_too_small_stays_inside_the_tensors():
    p = Problem([70, 90], [20, 140], heads=1, dtype=torch.float16)
    spec = launch.Spec(16, 64, [(0, 1, 4)], 1.0, None, None)
    before = [t.clone() for t in (p.q, p.k, p.v, p.grad)]
    launch.forward(*p.arguments, spec)
    launch.backward(p.grad, *p.arguments, spec)
    for tensor, copy in zip((p.q, p.k, p.v, p.grad), before):
        assert torch.equal(tensor, copy)


def test_zero_slack():
    for end in (0, 3, 10):
        x = torch.ones(10, 2, 300)
        launch.zero_slack(x, torch.tensor([0, end // 2, end]))
        assert x[:end].all() and not x[end:].any()


def test_limits_are_named():
    q = torch.ones(2, 1, 257)
    with pytest.raises(ValueError, match="256, got 257"):
        launch.check_supported(q)


@pytest.fixture(scope="module")
def compiled():
    return run_checks("recsys_norm.kernels.gdpa.cases")


def test_kernels_compile_for_every_declared_architecture(compiled):
    declared = {k: v for k, v in declared_architectures().items() if k.startswith("gdpa.")}
    assert {(s.kernel, s.arch) for s in compiled} == {(k, arch) for k, archs in declared.items() for arch in archs}


def test_registers_spills_and_shared_memory_are_bounded(compiled):
    for s in compiled:
        # The one-pass backward keeps two 128 x 128 accumulators; what it spills lives outside its loop.
        allowed = 256 if s.kernel == "gdpa.backward_resident" and "d128" in s.label else 0
        assert s.spill_bytes <= allowed, s
        assert s.blocks_per_sm >= 1 and not s.serialized, s
        if s.kernel == "gdpa.forward_resident":
            assert s.blocks_per_sm >= 2, s  # one program's matrix products hide the other's activations
