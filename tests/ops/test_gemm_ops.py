"""norm, norm_linear, linear_norm, linear_norm_linear: the public functions against the fp64 reference."""

import importlib
import itertools

import pytest
import torch
from op_cases import FORCED, GEMM_OPS, tensors_for

from recsys_norm import ops, reference
from recsys_norm.ops import registry
from recsys_norm.testing import check_op

FALLBACK = {"backend": "fused", "on_unsupported": "fallback"}  # on CPU: technique `separate` in plain PyTorch


def run(op, norm, options=None, candidate=None, **shape):
    name = {"layer": "layer_norm", "rms": "rms_norm"}[norm] if op == "norm" else op
    options = dict(options or {}) if op == "norm" else {"norm": norm, **(options or {})}
    return check_op(name, tensors_for(op, norm=norm, **shape), options, candidate or FALLBACK)


@pytest.mark.parametrize("op", GEMM_OPS)
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine,bias", [(True, True), (False, False)])
@pytest.mark.filterwarnings("ignore:.*cannot run")
def test_separate_matches_reference(op, norm, dtype, affine, bias):
    run(op, norm, dtype=dtype, affine=affine, bias=bias)
    run(op, norm, dtype=dtype, affine=affine, bias=bias, param_dtype=torch.float32, mean=5.0, candidate=FORCED)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("position,return_sum", [("after", False), ("before", False), ("before", True)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_norm_residuals(norm, position, return_sum, affine, dtype):
    options = {"residual_position": position, "return_sum": return_sum}
    run("linear_norm", norm, options, FORCED, residual=True, affine=affine, dtype=dtype)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("position,return_sum", [(None, False), ("after", False), ("before", True)])
def test_linear_norm_in_groups(norm, position, return_sum):
    """Each group is what a linear_norm of its own would give."""
    options = {"groups": 3, "return_sum": return_sum, "residual_position": position or "after"}
    for affine, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        tensors = tensors_for("linear_norm", norm=norm, N=24, residual=position is not None, affine=affine, dtype=dtype)
        check_op("linear_norm", tensors, {"norm": norm, **options}, FORCED)
    tensors = tensors_for("linear_norm", norm=norm, N=24, residual=position is not None)
    whole = ops.linear_norm(**tensors, norm=norm, **options, technique="separate")
    for group in range(3):
        part = slice(8 * group, 8 * group + 8)
        own = {
            n: t if n == "x" or t is None else t[..., part] if n == "residual" else t[part] for n, t in tensors.items()
        }
        alone = ops.linear_norm(**own, norm=norm, **(options | {"groups": 1}), technique="separate")
        for mine, theirs in zip(*((t if return_sum else (t,)) for t in (whole, alone)), strict=True):
            torch.testing.assert_close(mine[..., part], theirs)


@pytest.mark.filterwarnings("ignore:.*cannot run")
def test_naive_takes_groups_one_by_one():
    tensors = tensors_for("linear_norm", N=24, residual=True)
    options = {"norm": "layer", "groups": 3, "residual_position": "before", "return_sum": True}
    registry.reset_counts()
    check_op("linear_norm", tensors, options, {"backend": "naive", "on_unsupported": "fallback"})
    assert registry.counts()["linear_norm"]["separate (torch)"] % 3 == 0


def test_where_no_kernel_is_able_the_policy_decides(monkeypatch):
    """How the backward's input is kept is asked before a technique is selected, and raises nothing."""
    module = importlib.import_module("recsys_norm.ops.linear_norm")
    monkeypatch.setattr(module, "arch_of", lambda device: 75)
    monkeypatch.setattr(module, "triton_version", lambda: (3, 6))
    where = (torch.device("cuda"), "fused", None)
    assert module._product_is_written("rms", torch.bfloat16, 64, 64, True, 1, *where) is False


@pytest.mark.parametrize("groups", [0, 5])
def test_groups_divide_the_features(groups):
    with pytest.raises(ValueError, match=f"groups={groups} do not divide the 24 out-features"):
        ops.linear_norm(torch.ones(2, 8), torch.ones(24, 8), norm="rms", groups=groups, technique="separate")


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("return_sum", [False, True])
def test_norm_residual(norm, return_sum):
    run("norm", norm, {"return_sum": return_sum}, FORCED, residual=True)


def test_returned_sum_without_residual():
    run("linear_norm", "layer", {"return_sum": True}, FORCED)
    run("norm", "rms", {"return_sum": True}, FORCED)


@pytest.mark.parametrize(
    "activation", ["identity", "relu", "relu2", "leaky_relu", "gelu", "gelu_tanh", "silu", "hardswish"]
)
def test_linear_norm_linear_activations(activation):
    for norm in ("rms", "layer"):
        run("linear_norm_linear", norm, {"activation": activation}, FORCED)


@pytest.mark.parametrize("width", [3, 17, 63, 65, 123, 384, 760, 1128, 4097])
def test_a8_widths_that_are_not_powers_of_two(width):
    for op, norm in itertools.product(GEMM_OPS, ("rms", "layer")):
        run(op, norm, candidate=FORCED, M=3, K=width, N=width if width <= 1128 else 17, mean=5.0)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a8_one_feature(norm):
    """The gradient of x is a difference of equal terms: 0 up to their rounding (and rms's eps)."""
    for op in ("norm", "norm_linear"):
        t = tensors_for(op, M=3, K=1, norm=norm, mean=5.0)
        name, options = {"norm": (f"{norm}_norm", {}), "norm_linear": (op, {"norm": norm})}[op]
        frozen = {n: v if v is None else v.detach().requires_grad_(n != "x") for n, v in t.items()}
        check_op(name, frozen, options, FORCED)
        function = getattr(ops, name)
        (dx,) = torch.autograd.grad(function(**t, **options, technique="separate").sum(), t["x"])
        gain = t["weight"].abs().sum().item() * (t["norm_weight"].abs().item() if op == "norm_linear" else 1)
        terms = gain / t["x"].abs() if norm == "rms" else torch.full_like(t["x"], gain / 1e-5**0.5)
        assert (dx.abs() <= terms * (1e-5 / t["x"].square() if norm == "rms" else 0) + 4e-7 * terms).all()


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a10_rows_without_variance(norm):
    x = torch.zeros(4, 8)
    x[1] = 3.0
    x = torch.cat([x, torch.full((1, 8), 65504.0)])
    for dtype in (torch.float16, torch.float32):
        tensors = tensors_for("norm_linear", K=8, norm=norm, dtype=dtype)
        tensors["x"] = x.to(dtype).requires_grad_()
        # a constant row's gradient is a difference of equal terms times 1 / sqrt(eps)
        scale = 1e3 * tensors["weight"].norm().item() * 5**0.5 * 20**0.5
        check_op("norm_linear", tensors, {"norm": norm}, FORCED, cancelling={"x": scale})
    one = ops.layer_norm(torch.tensor([[7.0], [0.0]]), technique="separate")
    assert torch.equal(one, torch.zeros(2, 1))


@pytest.mark.parametrize("ratio,dtype", [(1e3, torch.float32), (1e4, torch.float32), (100.0, torch.bfloat16)])
def test_a11_large_mean_small_variance(ratio, dtype):
    for op in GEMM_OPS:
        run(op, "layer", candidate=FORCED, mean=ratio, dtype=dtype, M=9, K=40)


@pytest.mark.parametrize("op", GEMM_OPS)
@pytest.mark.parametrize("eps", [1e-5, 1e-6, None])
def test_a12_eps_decides_small_inputs(op, eps):
    run(op, "rms", {"eps": eps}, FORCED, scale=1e-3)
    if eps is not None:
        run(op, "layer", {"eps": eps}, FORCED, scale=1e-3)
        if op == "norm_linear":
            t = tensors_for(op, scale=1e-3)
            other = ops.norm_linear(**t, norm="layer", eps=10 * eps, technique="separate")
            assert not torch.allclose(
                other, ops.norm_linear(**t, norm="layer", eps=eps, technique="separate"), rtol=0.05
            )


def test_a12_eps_none_is_what_torch_does():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (torch.randn(5, 16) * 1e-3).to(dtype)
        expected = torch.nn.functional.rms_norm(x, (16,), eps=None)
        torch.testing.assert_close(ops.rms_norm(x, eps=None, technique="separate"), expected, rtol=1e-2, atol=0)


def strided_views():
    base = torch.randn(40, 48, generator=torch.Generator().manual_seed(3))
    yield "transposed", base[:24, :17].t()
    yield "every second column", base[:17, ::2]
    yield "slice of a fused projection", base[:17, 3:27]
    yield "expanded rows", base[:1, :24].expand(17, 24)
    yield "three leading dimensions", torch.randn(3, 5, 2, 24).transpose(0, 1)


@pytest.mark.parametrize("op", GEMM_OPS)
def test_a7_strides(op):
    for name, view in strided_views():
        tensors = tensors_for(op)
        results = []
        for x in (view.detach(), view.detach().clone(memory_format=torch.contiguous_format)):
            t = {**tensors, "x": x.requires_grad_()}
            function, options = (ops.layer_norm, {}) if op == "norm" else (getattr(ops, op), {"norm": "layer"})
            y = function(**t, **options, technique="separate")
            wanted = [v for v in t.values() if v is not None]
            grads = torch.autograd.grad(y.sum(), wanted)  # .sum() hands the op an expanded gradient
            results.append([y, *grads])
            assert y.shape[:-1] == x.shape[:-1]
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, msg=f"{op}, {name}")


@pytest.mark.parametrize("op", GEMM_OPS)
@pytest.mark.parametrize("shape", [(0, 24), (3, 0, 24)])
@pytest.mark.filterwarnings("ignore:.*cannot run")
def test_empty_inputs(op, shape):
    tensors = tensors_for(op)
    tensors["x"] = torch.empty(shape, requires_grad=True)
    for backend in ("unfused", "fused"):
        function, options = (ops.layer_norm, {}) if op == "norm" else (getattr(ops, op), {"norm": "layer"})
        y = function(**tensors, **options, backend=backend, on_unsupported="fallback")
        assert y.shape[:-1] == shape[:-1] and y.numel() == 0
        grads = torch.autograd.grad(y.sum(), [t for t in tensors.values() if t is not None])
        assert all(torch.isfinite(g).all() and g.abs().sum() == 0 for g in grads)


@pytest.mark.parametrize("op", ["norm_linear", "linear_norm", "linear_norm_linear", "norm"])
def test_a20_every_combination_of_frozen_parameters(op):
    full = tensors_for(op, residual=op in ("norm", "linear_norm"))
    names = [n for n, t in full.items() if t is not None]
    function, options = (ops.layer_norm, {}) if op == "norm" else (getattr(ops, op), {"norm": "layer"})

    def gradients(live):
        t = {n: None if v is None else v.detach().requires_grad_(n in live) for n, v in full.items()}
        y = function(**t, **options, technique="separate")
        if not live:
            assert not y.requires_grad
            return {}
        return dict(zip(live, torch.autograd.grad(y.square().sum(), [t[n] for n in live])))

    everything = gradients(names)
    for r in range(len(names)):
        for live in itertools.combinations(names, r):
            for name, grad in gradients(live).items():
                torch.testing.assert_close(grad, everything[name], msg=f"{name} of {live}")


def test_a20_frozen_parameters_waste_no_gemm(monkeypatch):
    """The technique runs the GEMMs that the FLOP formula of the op counts, and no other."""
    from torch.utils.flop_counter import FlopCounterMode

    from recsys_norm.ops import torch_separate

    gemm = 2 * 17 * 24 * 20
    counted = []
    plain = torch_separate.NormLinear.backward

    def counting(*args):
        with FlopCounterMode(display=False) as flops:
            grads = plain(*args)
        counted.append(flops.get_total_flops())
        return grads

    monkeypatch.setattr(torch_separate.NormLinear, "backward", counting)
    for live, gemms in ((["x"], 1), (["weight"], 1), (["bias"], 0), (["norm_bias"], 1), (["x", "weight"], 2)):
        t = {n: v.detach().requires_grad_(n in live) for n, v in tensors_for("norm_linear").items()}
        y = ops.norm_linear(**t, norm="layer", technique="separate")
        with FlopCounterMode(display=False) as flops:
            y.sum().backward()
        assert flops.get_total_flops() == counted[-1] == gemms * gemm, live


@pytest.mark.parametrize("op", GEMM_OPS)
def test_a17_autocast(op):
    """fp32 inputs under autocast equal bf16 inputs with fp32 parameters."""
    t = tensors_for(op)
    function, options = (ops.layer_norm, {}) if op == "norm" else (getattr(ops, op), {"norm": "layer"})
    for backend in ({"backend": "unfused"}, FORCED):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = function(**t, **options, **backend)
        assert y.dtype == torch.bfloat16
        expected = function(**{**t, "x": t["x"].to(torch.bfloat16)}, **options, **backend)
        assert torch.equal(y, expected)
        grads = torch.autograd.grad(y.float().sum(), [v for v in t.values() if v is not None])
        assert all(g.dtype == torch.float32 for g in grads)


def test_a16_gradient_of_the_norm_weight_over_many_rows():
    """131,072 rows in bf16: partial sums in fp32, one cast."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(131072, 8, generator=g).to(torch.bfloat16)
    dy = torch.randn(131072, 8, generator=g).to(torch.bfloat16)
    for dtype, bound in ((torch.bfloat16, 4e-3), (torch.float32, 1e-5)):
        weight = torch.ones(8, dtype=dtype, requires_grad=True)
        (grad,) = torch.autograd.grad(ops.rms_norm(x, weight, technique="separate"), weight, dy)
        xhat = reference.normalize(x.double(), "rms", None, None, 1e-5)
        expected = (dy.double() * xhat).sum(0)
        scale = (dy.double() * xhat).square().sum(0).sqrt()  # what sqrt(M) terms of random sign add up to
        assert ((grad.double() - expected).abs() <= bound * torch.maximum(scale, expected.abs())).all()


def test_a18_two_runs_are_bit_identical():
    """The suite's deterministic mode is on, and nothing raises."""
    for op in GEMM_OPS[1:]:
        t = tensors_for(op)
        names = [n for n, v in t.items() if v is not None]
        runs = []
        for _ in range(2):
            y = getattr(ops, op)(**t, norm="layer", technique="separate")
            runs.append([y, *torch.autograd.grad(y.square().sum(), [t[n] for n in names])])
        assert all(torch.equal(a, b) for a, b in zip(*runs))
