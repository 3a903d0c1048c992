"""The norm kernels and technique `separate`, in Triton's interpreter where there is no GPU: fp32 and fp16, since the
interpreter rounds to bf16 wrongly. Larger cases and bf16 are in tests/gpu/test_norm.py."""

import itertools
import sys

import pytest
import torch
from op_cases import FORCED, GEMM_OPS, check_added_gradient, tensors_for
from torch.utils._python_dispatch import TorchDispatchMode

from recsys_norm import ops
from recsys_norm.kernels.compile import declared_architectures, run_checks
from recsys_norm.kernels.norm import techniques
from recsys_norm.ops import registry
from recsys_norm.ops.problem import AttentionSpec, Problem
from recsys_norm.ops.torch_separate import statistics
from recsys_norm.reference import normalize
from recsys_norm.testing import check_close_to_reference, check_op

SEPARATE = dict(techniques())["norm"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernels_serve(monkeypatch):
    """The public ops run the kernels on this device, whichever it is."""
    monkeypatch.setattr(registry, "_candidates", lambda problem, direction: ((SEPARATE,), ()))
    registry.reset_counts()
    yield
    assert "separate" in str(registry.counts()) and "(torch)" not in str(registry.counts())


def on_device(tensors):
    return {n: t if t is None else t.detach().to(DEVICE).requires_grad_(t.requires_grad) for n, t in tensors.items()}


def run(op, norm, options=None, cancelling=None, tensors=None, **shape):
    name = f"{norm}_norm" if op == "norm" else op
    options = dict(options or {}) if op == "norm" else {"norm": norm, **(options or {})}
    tensors = on_device(tensors or tensors_for(op, norm=norm, **shape))
    return check_op(name, tensors, options, FORCED, cancelling=cancelling)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("width", [3, 17, 65, 127, 384, 760, 1128, 4097])
def test_a8_widths_that_are_not_powers_of_two(kernels_serve, norm, width):
    run("norm", norm, M=5, K=width, mean=5.0, residual=width in (65, 384))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a8_rows_wider_than_a_block(kernels_serve, norm):
    run("norm", norm, {"return_sum": True}, M=3, K=8200, mean=1e3, residual=True)
    run("linear_norm_linear", norm, {"activation": "silu"}, M=3, K=4, N=8200, N2=3)


def test_a8_one_feature(kernels_serve):
    t = on_device(tensors_for("norm", M=3, K=1, mean=5.0))
    y = ops.layer_norm(**t, technique="separate")
    assert torch.equal(y, t["bias"].expand(3, 1))
    (dx,) = torch.autograd.grad(y.sum(), t["x"])
    assert torch.equal(dx, torch.zeros_like(dx))


@pytest.mark.parametrize("op", GEMM_OPS)
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize(
    "dtype,param_dtype", [(torch.float32, None), (torch.float16, None), (torch.float16, torch.float32)]
)
def test_ops_match_reference(kernels_serve, op, norm, dtype, param_dtype):
    run(op, norm, dtype=dtype, param_dtype=param_dtype, M=9)
    run(op, norm, dtype=dtype, param_dtype=param_dtype, M=9, affine=False, bias=False)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("position,return_sum", [("after", False), ("before", False), ("before", True)])
def test_residual_and_returned_sum(kernels_serve, norm, affine, position, return_sum):
    options = {"residual_position": position, "return_sum": return_sum}
    run("linear_norm", norm, options, residual=True, affine=affine, M=9, K=16, N=40)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("position,return_sum", [(None, False), ("after", False), ("before", True)])
@pytest.mark.parametrize("groups,width", [(2, 40), (3, 64), (4, 17)])
def test_groups(kernels_serve, norm, position, return_sum, groups, width):
    options = {"groups": groups, "return_sum": return_sum, "residual_position": position or "after"}
    for M, affine in ((70, True), (3, False)):  # 70 rows take several turns of the backward's grid
        shape = dict(M=M, K=16, N=groups * width, affine=affine, dtype=torch.float16)
        run("linear_norm", norm, options, residual=position is not None, **shape)


def test_groups_keep_to_rows_in_registers():
    problem = dict(op="linear_norm", norm="rms", M=512, K=512, dtype=torch.float16, param_dtype=torch.float16, eps=1e-5)
    problem |= dict(device="cuda", arch=90, triton_version=(3, 6))
    assert SEPARATE.why_not(Problem(**problem, N=2 * 4096, groups=2)) is None
    assert "at most 4096 features and these are 4104" in SEPARATE.why_not(Problem(**problem, N=2 * 4104, groups=2))
    assert "at most 2048 features and these are 2500" in SEPARATE.why_not(Problem(**problem, N=2 * 2500, groups=2))
    able, reasons = registry._candidates(Problem(**problem, N=1024, groups=2), "forward")
    assert [t.name for t in able] == ["separate"] and any("not 2 groups of features" in reason for reason in reasons)


@pytest.mark.parametrize(
    "activation", ["identity", "relu", "relu2", "leaky_relu", "gelu", "gelu_tanh", "silu", "hardswish"]
)
def test_activations(kernels_serve, activation):
    run("linear_norm_linear", "layer", {"activation": activation}, M=9, scale=3.0)


def test_a7_strides(kernels_serve):
    base = torch.randn(40, 48, device=DEVICE)
    for x in (base[:24, :17].t(), base[:17, ::2], base[:17, 3:27], base[:17, 8:32], base[:1, :24].expand(17, 24)):
        results = []
        for view in (x.detach(), x.detach().clone(memory_format=torch.contiguous_format)):
            t = on_device(tensors_for("norm"))
            t["x"] = view.requires_grad_()
            y = ops.layer_norm(**t, technique="separate")
            results.append([y, *torch.autograd.grad(y.sum(), list(t.values()))])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a10_rows_without_variance(kernels_serve, norm, dtype):
    x = torch.zeros(6, 64)
    x[1] = 3.0
    x[2] = 65504.0
    x[3] = -65504.0
    x[4] = torch.where(torch.arange(64) % 2 == 0, 65504.0, -65504.0)
    tensors = tensors_for("norm", M=6, K=64, norm=norm, dtype=dtype)
    tensors["x"] = x.to(dtype).requires_grad_()
    # The gradient of a constant row is a difference of equal terms times 1 / sqrt(eps).
    scale = 1e-5**-0.5 * tensors["weight"].norm().item() * 6**0.5
    run("norm", norm, tensors=tensors, cancelling={"x": scale})


@pytest.mark.parametrize("ratio", [1e3, 1e4])
@pytest.mark.parametrize("width", [40, 8200])
def test_a11_large_mean_small_variance(kernels_serve, ratio, width):
    run("norm", "layer", mean=ratio, M=5, K=width)
    if width == 40:
        run("norm_linear", "layer", mean=ratio, M=5, K=width)
        run("linear_norm_linear", "layer", {"activation": "gelu"}, mean=ratio, M=5, K=width)


@pytest.mark.parametrize("op", GEMM_OPS)
def test_a12_eps_decides_small_inputs(kernels_serve, op):
    for norm, eps in itertools.product(("rms", "layer"), (1e-5, 1e-6)):
        run(op, norm, {"eps": eps}, M=5, scale=1e-3, bias=False)
    run(op, "rms", {"eps": None}, M=5, scale=1e-3)


@pytest.mark.parametrize("op", GEMM_OPS)
def test_a18_same_bits_in_every_run(kernels_serve, op):
    function = ops.layer_norm if op == "norm" else getattr(ops, op)
    options = {} if op == "norm" else {"norm": "layer"}
    runs = []
    for _ in range(2):
        t = on_device(tensors_for(op, M=70, K=40))
        y = function(**t, **options, technique="separate")
        runs.append([y, *torch.autograd.grad(y.square().sum(), list(t.values()))])
    for a, b in zip(*runs):
        assert torch.equal(a, b)


class Spy:
    """Counts the GEMMs and kernel passes of a backward."""

    def __init__(self, monkeypatch):
        from recsys_norm.kernels.norm import launch

        self.calls = []
        for name in ("norm_forward", "norm_backward", "column_sum"):
            self._count(monkeypatch, launch, name)
        self._count(monkeypatch, torch, "mm")

    def _count(self, monkeypatch, module, name):
        original = getattr(module, name)

        def counted(*args, **kwargs):
            self.calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)


ORDER = {
    "norm": ("x", "weight", "bias", "residual"),
    "norm_linear": ("x", "weight", "bias", "norm_weight", "norm_bias"),
    "linear_norm": ("x", "weight", "bias", "norm_weight", "norm_bias", "residual"),
    "linear_norm_linear": ("x", "weight1", "bias1", "weight2", "bias2", "norm_weight", "norm_bias"),
}


@pytest.mark.parametrize("op", GEMM_OPS)
def test_a20_frozen_parameters(kernels_serve, op):
    """What needs a gradient gets the same as when everything does. A sample of combinations; all of them on a GPU."""
    function = ops.layer_norm if op == "norm" else getattr(ops, op)
    options = {} if op == "norm" else {"norm": "layer"}
    if op == "linear_norm":
        options["residual_position"] = "before"
    tensors = tensors_for(op, M=4, K=6, N=5, N2=3, residual=op in ("norm", "linear_norm"))
    names = ORDER[op]

    def gradients(wanted):
        t = on_device({n: v.detach().requires_grad_(n in wanted) for n, v in tensors.items()})
        y = function(**t, **options, technique="separate")
        return dict(zip(wanted, torch.autograd.grad(y.square().sum(), [t[n] for n in wanted])))

    everything = gradients(names)
    combinations = [c for r in range(1, len(names)) for c in itertools.combinations(names, r)]
    for wanted in combinations[:: {4: 1, 5: 2, 6: 5, 7: 8}[len(names)]]:
        for name, grad in gradients(wanted).items():
            torch.testing.assert_close(grad, everything[name], rtol=1e-4, atol=1e-5, msg=f"{name} of {wanted}")


@pytest.mark.parametrize(
    "op,wanted,calls",
    [
        ("norm_linear", ("bias",), ["column_sum"]),
        ("norm_linear", ("weight",), ["norm_forward", "mm"]),
        ("norm_linear", ("weight", "norm_weight"), ["norm_forward", "mm", "column_sum"]),
        ("norm_linear", ("norm_weight",), ["mm", "norm_backward"]),
        ("norm_linear", ("x",), ["mm", "norm_backward"]),
        ("norm_linear", ("x", "weight"), ["mm", "norm_backward", "mm"]),
        ("linear_norm", ("norm_weight",), ["norm_backward"]),
        ("linear_norm", ("bias",), ["norm_backward"]),
        ("linear_norm", ("x",), ["norm_backward", "mm"]),
        ("linear_norm_linear", ("bias2",), ["column_sum"]),
        ("linear_norm_linear", ("weight2",), ["norm_forward", "mm"]),
        ("linear_norm_linear", ("weight1",), ["mm", "norm_backward", "mm"]),
    ],
)
def test_a20_nothing_runs_for_a_frozen_parameter(kernels_serve, monkeypatch, op, wanted, calls):
    tensors = on_device({n: v.detach().requires_grad_(n in wanted) for n, v in tensors_for(op, M=4, K=6, N=5).items()})
    y = getattr(ops, op)(**tensors, norm="layer", technique="separate")
    spy = Spy(monkeypatch)
    torch.autograd.grad(y.sum(), [tensors[n] for n in wanted])
    assert spy.calls == calls


class Names(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", [op for op in GEMM_OPS if op != "norm"])
def test_no_zeros_are_made_for_outputs_that_are_only_saved(kernels_serve, op):
    """Autograd would fill a gradient for each, one of them as large as the rows."""
    tensors = on_device(tensors_for(op, M=4, K=6, N=5))
    y = getattr(ops, op)(**tensors, norm="layer", technique="separate")
    dy = torch.ones_like(y)
    with Names() as running:
        torch.autograd.grad(y, [t for t in tensors.values() if t is not None], dy)
    assert not [name for name in running.names if "zero" in name]


def test_inputs_are_never_modified(kernels_serve):
    for op in GEMM_OPS:
        tensors = on_device(tensors_for(op, residual=op in ("norm", "linear_norm")))
        before = {n: t.detach().clone() for n, t in tensors.items()}
        function, options = (ops.layer_norm, {}) if op == "norm" else (getattr(ops, op), {"norm": "layer"})
        dy = torch.randn_like(y := function(**tensors, **options, technique="separate"))
        kept = dy.clone()
        torch.autograd.grad(y, list(tensors.values()), dy)
        assert torch.equal(dy, kept)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, before[name]), f"{op} modified {name}"


def test_column_sum():
    from recsys_norm.kernels.norm.launch import column_sum

    for rows, width in ((1, 1), (40, 17), (100, 264)):
        x = torch.randn(rows, width, device=DEVICE)
        truth = x.double().sum(0)
        check_close_to_reference(column_sum(x, torch.float32), x.sum(0), truth, rows=False, cancelling=x.norm().item())


def test_normalised_rows_are_stored_as_asked():
    """z, zhat and y in one pass; y may take x's memory."""
    from recsys_norm.kernels.norm.launch import norm_forward

    x, residual = torch.randn(2, 6, 40, device=DEVICE)
    weight = torch.randn(40, device=DEVICE)
    options = dict(norm="layer", eps=1e-5, before=residual, write_z=True, write_hat=True)
    out = norm_forward(x, weight, None, **options)
    z = (x + residual).double()
    hat = normalize(z, "layer", None, None, 1e-5)
    torch.testing.assert_close(out.z.double(), z, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.hat.double(), hat, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.y.double(), hat * weight.double(), rtol=1e-5, atol=1e-6)
    scratch = x.clone()
    again = norm_forward(scratch, weight, None, overwrite=True, **options)
    assert again.z.data_ptr() == scratch.data_ptr()
    for a, b in zip(out, again):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype,width", [(torch.float16, 40), (torch.float32, 40), (torch.float32, 8200)])
def test_saved_means_are_relative_to_the_first_element(dtype, width):
    """As every technique saves them, so that the backward of one may follow the forward of another."""
    from recsys_norm.kernels.norm.launch import norm_forward

    x, before = (torch.randn(2, 5, width, device=DEVICE) + 30).to(dtype)
    for z, options in ((x, {}), (x + before, dict(before=before, write_z=True))):
        out = norm_forward(x, norm="layer", eps=1e-5, **options)
        mean, rstd = statistics(z, "layer", 1e-5)
        torch.testing.assert_close(out.mean, mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.rstd, rstd, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("width", [40, 8200])
def test_rows_that_are_cut(norm, width):
    """NaN past the last offset reaches nothing, and what is written there is 0."""
    from recsys_norm.kernels.norm.launch import norm_backward, norm_forward

    live, rows = 4, 7
    cut = (torch.tensor([0, 1, 2], device=DEVICE), 2)  # two tokens of two heads
    x, before, after, dy, more = torch.randn(5, rows, width, device=DEVICE)
    weight, bias = torch.randn(2, width, device=DEVICE)
    bias = bias if norm == "layer" else None

    def run(count, cut):
        x_, before_, after_, dy_, more_ = (t[:count] for t in (x, before, after, dy, more))
        options = dict(before=before_, after=after_, write_z=True, write_hat=True, norm=norm, eps=1e-5, cut=cut)
        out = norm_forward(x_, weight, bias, **options)
        sums = dict(dweight=torch.float32, dbias=torch.float32, dz_sum=torch.float32)
        g = norm_backward(dy_, out.z, out.mean, out.rstd, weight, norm=norm, more_dy=more_, cut=cut, **sums)
        return [out.y, out.z, out.hat, g.dz], [g.dweight, g.dbias, g.dz_sum]

    expected = run(live, None)
    for t in (x, before, after, dy, more):
        t[live:] = float("nan")
    got = run(rows, cut)
    for a, b in zip(got[0], expected[0]):
        torch.testing.assert_close(a[:live], b)
        assert not a[live:].any()
    for a, b in zip(got[1], expected[1]):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_gradient_of_the_residual_stream_is_added(kernels_serve, norm):
    for dtype, width, limit in ((torch.float32, 40, 1e-6), (torch.float16, 520, 2e-3)):
        check_added_gradient(
            "separate", on_device(tensors_for("norm_linear", K=width, norm=norm, dtype=dtype)), norm, limit
        )


def test_both_additions_in_one_pass():
    """more_dy and dsum at once, as where attention has an inner and an outer residual."""
    from recsys_norm.kernels.norm.launch import norm_backward, norm_forward

    for width in (40, 8200):
        z, dy, more, dsum = torch.randn(4, 5, width, device=DEVICE)
        out = norm_forward(z, norm="layer", eps=1e-5)
        options = dict(norm="layer", dweight=torch.float32, dz_sum=torch.float32)
        both = norm_backward(dy, z, out.mean, out.rstd, more_dy=more, dsum=dsum, **options)
        summed = norm_backward(dy + more, z, out.mean, out.rstd, **options)
        torch.testing.assert_close(both.dz, summed.dz + dsum)
        torch.testing.assert_close(both.dweight, summed.dweight)
        torch.testing.assert_close(both.dz_sum, summed.dz_sum + dsum.sum(0))


def test_no_rows():
    from recsys_norm.kernels.norm.launch import norm_backward, norm_forward

    x, weight = torch.empty(0, 40, device=DEVICE), torch.ones(40, device=DEVICE)
    out = norm_forward(x, weight, norm="layer", eps=1e-5)
    g = norm_backward(x, x, out.mean, out.rstd, weight, norm="layer", dweight=torch.float32)
    assert out.y.shape == g.dz.shape == (0, 40) and torch.equal(g.dweight, torch.zeros_like(weight))


def problem(**fields):
    given = dict(op="norm", norm="layer", M=4, K=8, N=8, dtype=torch.bfloat16, param_dtype=torch.bfloat16, eps=1e-5)
    return Problem(**{**given, "device": "cuda", "arch": 90, "triton_version": (3, 6), **fields})


def test_why_not_names_the_limit():
    assert SEPARATE.why_not(problem()) is None
    assert "cuda" in SEPARATE.why_not(problem(device="cpu", arch=None)).lower()
    assert "75" in SEPARATE.why_not(problem(arch=75)) and "80" in SEPARATE.why_not(problem(arch=75))
    assert "3.5" in SEPARATE.why_not(problem(triton_version=(3, 5)))
    assert "none" in SEPARATE.why_not(problem(triton_version=None))
    assert "float64" in SEPARATE.why_not(problem(dtype=torch.float64))
    assert "other" in SEPARATE.why_not(problem(op="other"))
    spec = AttentionSpec(8, 8, ("gelu",), False, 1.0, False, None, None, "q", "head", None, False)
    assert SEPARATE.why_not(problem(op="norm_attention", attention=spec, d=256)) is None
    assert "256" in SEPARATE.why_not(problem(op="norm_attention", attention=spec, d=264))


def test_kernels_compile_for_the_architectures_they_declare():
    """Without a GPU: every shipped tile becomes machine code without spills, and small enough to be launched."""
    stats = run_checks("recsys_norm.kernels.norm.cases")
    declared = {k: set(a) for k, a in declared_architectures().items() if k.startswith("norm.")}
    assert {k: {s.arch for s in stats if s.kernel == k} for k in declared} == declared
    for s in stats:
        assert s.spill_bytes == 0 and s.stack_bytes == 0, s
        assert s.blocks_per_sm >= 1 and s.shared_bytes <= 48 * 1024, s


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("residual", [False, True])
def test_the_product_is_kept_in_place_of_a_second_output(kernels_serve, monkeypatch, norm, residual):
    module = sys.modules["recsys_norm.ops.linear_norm"]
    monkeypatch.setattr(module, "_product_is_written", lambda *_: True)
    kept = []
    forward = SEPARATE.forward
    monkeypatch.setattr(SEPARATE, "forward", lambda *args: kept.append(forward(*args)) or kept[-1])
    run("linear_norm", norm, M=37, K=24, N=65, residual=residual)
    (_, z), (_, _, hat) = kept[0]
    assert z is not None and hat is None
