"""The norm kernels and technique `separate` on a GPU: the list of awkward inputs, in every dtype. Most of the time goes
to compiling; several processes with `-k` share the work through Triton's cache."""

import itertools

import pytest
import torch
from norm_attention_cases import LENGTHS, arguments, check_own_residual, check_slack
from op_cases import FORCED, GEMM_OPS, check_added_gradient, tensors_for

from recsys_norm import ops, reference
from recsys_norm.ops import registry
from recsys_norm.testing import check_close_to_reference, check_op, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORMS = ["rms", "layer"]
# Activations and parameters; every pair with at least one norm (a kernel is compiled per pair and norm).
KINDS = [(BF16, BF16, "rms"), (BF16, BF16, "layer"), (BF16, FP32, "layer"), (FP16, FP16, "rms")]
KINDS += [(FP32, FP32, "rms"), (FP32, FP32, "layer")]
# bf16: every width of acceptance case A8 and one width per tile.
WIDTHS = {
    (BF16, BF16): [1, 3, 17, 63, 64, 65, 123, 127, 128, 129, 256, 384, 512, 760, 1024, 1128, 2048, 4096, 4097]
    + [8192, 8200, 65536],
    (BF16, FP32): [129, 384, 8200],
    (FP16, FP16): [3, 1128],
    (FP32, FP32): [3, 384, 4097, 8200],
}


def on_gpu(tensors):
    return {n: t if t is None else t.detach().cuda().requires_grad_(t.requires_grad) for n, t in tensors.items()}


def run(op, norm, options=None, cancelling=None, tensors=None, **shape):
    name = f"{norm}_norm" if op == "norm" else op
    options = dict(options or {}) if op == "norm" else {"norm": norm, **(options or {})}
    tensors = on_gpu(tensors or tensors_for(op, norm=norm, **shape))
    return check_op(name, tensors, options, FORCED, cancelling=cancelling)


def call(op, tensors, **options):
    function = ops.layer_norm if op == "norm" else getattr(ops, op)
    return function(**tensors, **({} if op == "norm" else {"norm": "layer"}), **options, technique="separate")


@pytest.mark.parametrize("dtype,param_dtype,norm", KINDS)
def test_a8_widths(dtype, param_dtype, norm):
    for width in WIDTHS[dtype, param_dtype]:
        tensors = tensors_for("norm", M=300, K=width, norm=norm, dtype=dtype, param_dtype=param_dtype, mean=5.0)
        if width == 1:  # a difference of equal terms: checked for being small by test_a8_one_feature
            tensors["x"] = tensors["x"].detach()
        run("norm", norm, tensors=tensors)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_a8_one_feature(dtype):
    t = on_gpu(tensors_for("norm", M=3, K=1, mean=5.0, dtype=dtype))
    y = call("norm", t)
    assert torch.equal(y, t["bias"].expand(3, 1))
    (dx,) = torch.autograd.grad(y.sum(), t["x"])
    assert torch.equal(dx, torch.zeros_like(dx))


@pytest.mark.parametrize("op", GEMM_OPS)
@pytest.mark.parametrize("dtype,param_dtype,norm", KINDS)
def test_ops(op, dtype, param_dtype, norm):
    shape = dict(dtype=dtype, param_dtype=param_dtype, M=1030, K=264, N=200, N2=129)
    run(op, norm, **shape)
    if param_dtype == BF16:
        run(op, norm, **shape, affine=False, bias=False, scale=1e-3)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("position,return_sum", [(None, False), ("after", False), ("before", False), ("before", True)])
@pytest.mark.parametrize("groups,width,dtype", [(2, 512, BF16), (4, 1024, BF16), (3, 384, FP16), (5, 17, FP32)])
def test_groups(norm, position, return_sum, groups, width, dtype):
    options = {"groups": groups, "return_sum": return_sum, "residual_position": position or "after"}
    for M, affine in ((3000, True), (7, False)):
        shape = dict(M=M, K=264, N=groups * width, affine=affine, dtype=dtype)
        run("linear_norm", norm, options, residual=position is not None, **shape)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("position,return_sum", [("after", False), ("before", False), ("before", True)])
def test_residual_and_returned_sum(norm, dtype, position, return_sum):
    options = {"residual_position": position, "return_sum": return_sum}
    for affine in (True, False) if dtype == BF16 else (True,):
        run("linear_norm", norm, options, residual=True, affine=affine, M=500, K=64, N=384, dtype=dtype)
    if position == "before":
        run("norm", norm, {"return_sum": return_sum}, residual=True, M=500, K=384, dtype=dtype)


@pytest.mark.parametrize("norm", NORMS)
def test_a_gradient_of_the_residual_stream_is_added(norm):
    for dtype, width, limit in ((BF16, 512, 8e-3), (FP16, 1128, 1e-3), (FP32, 384, 1e-6), (BF16, 8200, 8e-3)):
        shape = dict(M=1030, K=width, N=136, dtype=dtype, param_dtype=FP32)
        check_added_gradient("separate", on_gpu(tensors_for("norm_linear", norm=norm, **shape)), norm, limit)


@pytest.mark.parametrize("activation", "identity relu relu2 leaky_relu gelu gelu_tanh silu hardswish".split())
def test_activations(activation):
    # Where the slope jumps, the rounding of a 16-bit z flips it for some values, in any implementation.
    dtype = FP32 if activation in ("relu", "leaky_relu", "hardswish") else BF16
    run("linear_norm_linear", "layer", {"activation": activation}, M=700, K=64, N=256, N2=64, scale=3.0, dtype=dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a7_strides(dtype):
    base = torch.randn(400, 480, device="cuda").to(dtype)
    views = {
        "transposed": base[:264, :170].t(),
        "every second column": base[:170, : 2 * 200 : 2],
        "misaligned": base[:170, 3:267],
        "slice of a fused projection": base[:170, 8:272],
        "expanded rows": base[:1, :264].expand(170, 264),
        "three leading dimensions": base[:120, :264].reshape(3, 5, 8, 264).transpose(0, 1),
    }
    few = ("misaligned", "slice of a fused projection")
    limit = 4e-3 if dtype == BF16 else 1e-5  # another tile or GEMM kernel adds in another order
    for op, (label, view) in itertools.product(GEMM_OPS, views.items()):
        if op != "norm" and label not in few:
            continue
        results = []
        for x in (view.detach(), view.detach().clone(memory_format=torch.contiguous_format)):
            t = on_gpu(tensors_for(op, K=x.shape[-1], N=136, N2=64, dtype=dtype)) | {"x": x.requires_grad_()}
            y = call(op, t)
            results.append([y, *torch.autograd.grad(y.sum(), list(t.values()))])  # .sum(): an expanded gradient
        for a, b in zip(*results):
            assert relative_error(a, b, rows=False, cancelling=1.0) <= limit, f"{op}, {label}"


@pytest.mark.parametrize("norm,dtype", [("layer", BF16), ("layer", FP16), ("rms", FP16), ("layer", FP32)])
def test_a10_rows_without_variance(norm, dtype):
    for width in (64, 760, 1128):
        x = torch.zeros(7, width)
        x[1], x[2], x[3] = 3.0, 65504.0, -65504.0
        x[4] = torch.where(torch.arange(width) % 2 == 0, 65504.0, -65504.0)
        x[5] = 1e-3
        tensors = tensors_for("norm", M=7, K=width, norm=norm, dtype=dtype)
        tensors["x"] = x.to(dtype).requires_grad_()
        # The gradient of a constant row is a difference of equal terms times 1 / sqrt(eps).
        scale = 1e-5**-0.5 * tensors["weight"].norm().item() * 7**0.5
        run("norm", norm, tensors=tensors, cancelling={"x": scale})


def test_a10_constant_rows_have_no_deviation():
    """The mean of equal 16-bit values is that value at every width, or a row of 65504 would come out as +-1."""
    for width in (3, 17, 384, 760, 1000, 1128, 4097):
        x = torch.full((2, width), 65504.0, dtype=FP16, device="cuda")
        assert torch.equal(ops.layer_norm(x, technique="separate"), torch.zeros_like(x)), width


@pytest.mark.parametrize("mean,dtype", [(1e3, FP32), (1e4, FP32), (100.0, BF16)])
def test_a11_large_mean_small_variance(mean, dtype):
    for width in (17, 384, 1128, 8200):
        run("norm", "layer", mean=mean, dtype=dtype, M=300, K=width)
    for op in GEMM_OPS[1:]:
        run(op, "layer", mean=mean, dtype=dtype, M=300, K=264, N=136, N2=64)


@pytest.mark.parametrize("op", GEMM_OPS)
def test_a12_eps_decides_small_inputs(op):
    for dtype, norm, eps in itertools.product((BF16, FP32), NORMS, (1e-5, 1e-6)):
        run(op, norm, {"eps": eps}, M=300, scale=1e-3, bias=False, dtype=dtype)
    run(op, "rms", {"eps": None}, M=300, scale=1e-3, dtype=BF16)


@pytest.mark.parametrize("param_dtype", [BF16, FP32])
def test_a16_parameter_gradients_over_many_rows(param_dtype):
    """Rows with a common part add up, so partial sums in 16 bits would lose what the last rows carry."""
    # One rounding to bf16; else fp32 sums, and for the GEMM bf16 operands whose errors average out.
    limits = {"norm": 4e-3 if param_dtype == BF16 else 1e-5, "norm_linear": 4e-3 if param_dtype == BF16 else 6e-4}
    for op, limit in limits.items():
        function = reference.layer_norm if op == "norm" else reference.norm_linear
        errors = {}
        for M in (1 << 11, 1 << 17):
            t = on_gpu(tensors_for(op, M=M, K=256, N=128, dtype=BF16, param_dtype=param_dtype, mean=1.0))
            exact = {n: v.detach().double().requires_grad_() for n, v in t.items()}
            y = call(op, t)
            dy = (torch.randn_like(y) + 1).detach()
            truth = function(**exact, **({} if op == "norm" else {"norm": "layer"}))
            mine = torch.autograd.grad(y, (t["weight"], t["bias"]), dy)
            truth = torch.autograd.grad(truth, (exact["weight"], exact["bias"]), dy.double())
            for name, a, r in zip(("weight", "bias"), mine, truth):
                assert a.dtype == param_dtype
                errors[name, M] = relative_error(a, r, rows=False)
                assert errors[name, M] <= limit, (op, errors)
        for name in ("weight", "bias"):
            assert errors[name, 1 << 17] <= 8 * max(errors[name, 1 << 11], 1e-6), (op, errors)  # sqrt(M) grows by 8


def test_a17_autocast():
    t = on_gpu(tensors_for("norm_linear", M=300, K=264, N=136))
    with torch.autocast("cuda", BF16):
        y = call("norm_linear", t)
    assert y.dtype == BF16
    grads = torch.autograd.grad(y.sum(), list(t.values()))
    assert all(g.dtype == FP32 and torch.isfinite(g).all() for g in grads)
    run("norm_linear", "layer", M=300, K=264, N=136, dtype=BF16, param_dtype=FP32)


@pytest.mark.parametrize("op", GEMM_OPS)
def test_a18_same_bits_in_every_run(op):
    t = on_gpu(tensors_for(op, M=70001, K=264, N=136, N2=64, dtype=BF16, param_dtype=FP32))
    first = None
    for _ in range(3):
        y = call(op, t)
        results = [y, *torch.autograd.grad(y, list(t.values()), torch.ones_like(y))]
        first = first or results
        for a, b in zip(first, results):
            assert torch.equal(a, b)


@pytest.mark.parametrize("op", GEMM_OPS)
def test_a20_frozen_parameters(op):
    """Whatever needs a gradient gets the same one as when everything does."""
    residual = op in ("norm", "linear_norm")
    tensors = on_gpu(tensors_for(op, M=64, K=64, N=64, N2=8, residual=residual))
    options = {"residual_position": "before"} if op == "linear_norm" else {}

    def gradients(wanted):
        t = {n: v.detach().requires_grad_(n in wanted) for n, v in tensors.items()}
        y = call(op, t, **options)
        return dict(zip(wanted, torch.autograd.grad(y.square().sum(), [t[n] for n in wanted])))

    names = list(tensors)
    everything = gradients(names)
    combinations = [c for r in range(1, len(names)) for c in itertools.combinations(names, r)]
    for wanted in combinations[:: {4: 1, 5: 1, 6: 5, 7: 8}[len(names)]]:
        for name, grad in gradients(wanted).items():
            assert relative_error(grad, everything[name], rows=False, cancelling=1.0) < 1e-5, f"{name} of {wanted}"


def check_ends(x, y, dx, dy, weight, bias, label):
    """Rows at both ends against fp64; an address that wraps at 2^31 shows in the last ones."""
    rows = torch.cat([torch.arange(64), torch.arange(x.shape[0] - 64, x.shape[0])]).cuda()
    results = []
    for dtype in (torch.float64, x.dtype):
        part = x.detach()[rows].to(dtype).requires_grad_()
        out = torch.nn.functional.layer_norm(part, part.shape[-1:], weight.to(dtype), bias.to(dtype))
        results.append((out, *torch.autograd.grad(out, part, dy[rows].to(dtype))))
    for a, r, u, name in zip((y[rows], dx[rows]), *results, ("y", "dx")):
        check_close_to_reference(a, u, r, name=f"{label} {name}")


@pytest.mark.parametrize(
    "M,N,stride", [((1 << 21) + 70, 1024, 1024), (4200, 64, 1 << 19), ((1 << 15) + 70, 1 << 16, 1 << 16)]
)
def test_a6_more_elements_than_int32_counts(M, N, stride):
    free, _ = torch.cuda.mem_get_info()
    needed = 2 * M * (stride + 4 * N) + (6 << 30)
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory, {free >> 30} GiB are free")
    assert (M - 1) * stride + N > 1 << 31
    x = torch.empty(M, stride, dtype=BF16, device="cuda")[:, :N].normal_().requires_grad_()
    weight, bias = torch.randn(2, N, device="cuda").to(BF16)
    weight.requires_grad_()
    dy = torch.empty(M, N, dtype=BF16, device="cuda").normal_()
    y = ops.layer_norm(x, weight, bias, technique="separate")
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    check_ends(x, y.detach(), dx, dy, weight.detach(), bias, f"{M}x{N}")
    truth = torch.zeros(N, dtype=torch.float64, device="cuda")
    for part, d in zip(x.detach().split(max(1, (1 << 28) // N)), dy.split(max(1, (1 << 28) // N))):
        part = part.float()
        hat = (part - part.mean(1, keepdim=True)) * torch.rsqrt(part.var(1, correction=0, keepdim=True) + 1e-5)
        truth += (hat * d).sum(0, dtype=torch.float64)
    assert relative_error(dweight, truth, rows=False) < 4e-3


def attend(lengths="ragged", more=None, **fields):
    t, options = arguments(lengths, device="cuda", **{"d": 64, "dtype": BF16, **fields})
    registry.reset_counts()
    check_op("norm_attention", t, options | (more or {}), FORCED)
    if t["q_THd"].numel():
        assert registry.counts()["norm_attention"]["separate"] > 0


@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention_a4_empty_sequences(lengths):
    post = None if lengths.startswith("all") else "rms"  # a row that is 0 everywhere has no defined direction
    # one key: its gradient is one dot product of do and v, which bf16 attention rounds by 20%, with or without norms
    dtype = dict(dtype=FP32) if lengths == "length one" else {}
    attend(lengths, dict(inner_residual=True), pre="layer", post=post, residual=True, **dtype)


@pytest.mark.parametrize("dtype,param_dtype", [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32)])
def test_attention_norms_and_residuals(dtype, param_dtype):
    few = [("layer", "rms"), (None, "layer")] if param_dtype == FP32 else itertools.product([None, *NORMS], repeat=2)
    for pre, post in few:
        fields = dict(pre=pre, post=post, dtype=dtype, param_dtype=param_dtype)
        attend("long", dict(inner_residual=True), residual=True, **fields)
        attend("long", affine=False, residual=pre is None, **fields)


@pytest.mark.parametrize("on", ["q", "k", "qk"])
@pytest.mark.parametrize("scope", ["all_heads", "head"])
def test_attention_sides_and_scopes(on, scope):
    attend("long", dict(inner_residual=on != "k", activation=("gelu", "silu")), pre="layer", on=on, scope=scope)
    lengths = ([70, 3, 130], [64, 20, 100])  # softmax over one key has the gradient 0
    attend(lengths, dict(softmax=True), pre="rms", on=on, scope=scope)
    attend(lengths, dict(softmax=True, window=40), pre="rms", on=on, scope=scope, dtype=FP32)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_self_attention(causal):
    # fp16: the first query of a sequence has the gradient 0, of which flash attention leaves 2.5e-2 in bf16. The scale keeps
    # scores near 1: they err by their size times the rounding of the normalised q and k, the same with any norm kernel.
    fields = dict(d=64, dtype=FP16, pre="rms", on="qk", scope="head", device="cuda")
    t, options = arguments(([70, 9, 130], [70, 9, 130]), **fields)
    t["k_offsets_B1"] = t["q_offsets_B1"]
    check_op("norm_attention", t, options | dict(softmax=True, causal=causal, window=32, scale=0.03), FORCED)


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("pre,post", [("layer", "rms"), (None, None), ("rms", None), (None, "layer")])
def test_attention_a5_rows_past_the_last_offset(pre, post, softmax):
    dtype, limit = (BF16, 3e-2) if softmax else (FP32, 1e-4)  # two roundings apart
    fields = dict(d=64, dtype=dtype, pre=pre, post=post, on="qk", residual=True, slack=40, device="cuda")
    for scope, inner in (("all_heads", True), ("head", False)):
        t, options = arguments(([70, 9, 130], [64, 20, 100]), scope=scope, **fields)
        check_slack(t, options | dict(inner_residual=inner, softmax=softmax), FORCED, 40, limit)


@pytest.mark.parametrize("pre,post", [("layer", "rms"), (None, "rms"), ("rms", None)])
def test_attention_q_as_its_own_residual(pre, post):
    for scope, inner, slack in (("all_heads", True, 40), ("head", False, 0)):
        t, options = arguments("long", d=64, dtype=BF16, pre=pre, post=post, scope=scope, slack=slack, device="cuda")
        check_own_residual(t, options | dict(inner_residual=inner), FORCED, 8e-3)


def test_attention_wide_rows_and_the_same_bits():
    t, options = arguments(([900, 0, 1500], [128, 128, 128]), H=8, d=128, dtype=BF16, param_dtype=FP32, pre="layer",
                           post="rms", residual=True, device="cuda")  # fmt: skip
    options |= dict(inner_residual=True)
    check_op("norm_attention", t, options, FORCED)
    first = None
    for _ in range(3):
        y = ops.norm_attention(**t, **options, technique="separate")
        results = [y, *torch.autograd.grad(y, [v for v in t.values() if v.requires_grad], torch.ones_like(y))]
        first = first or results
        for a, b in zip(first, results):
            assert torch.equal(a, b)
