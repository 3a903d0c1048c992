"""The staged backward of norm_attention on a GPU: the tolerance rule over heads, lengths, norms and residuals, rows past
the last sequence, and equal bits."""

import itertools

import pytest
import torch
from norm_attention_cases import LENGTHS, arguments, check_own_residual, check_slack

from recsys_norm import ops
from recsys_norm.kernels.hopper import attention_staged, launch
from recsys_norm.ops.norm_attention import _problem
from recsys_norm.ops.problem import AttentionSpec
from recsys_norm.testing import check_op

ARCH = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(launch.why_not(ARCH) is not None, reason="needs an H100 or H200 and its driver")

POLICY = {"backend": "fused", "technique": "hopper/staged"}
SEPARATE = {"backend": "fused", "technique": "separate"}
PFFN = dict(activation="gelu")
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(params=["attention_ahead", "attention_ahead_inner", "attention_staged"], autouse=True)
def kernel(request, monkeypatch):
    """Both kernels, and the one that knows an inner residual with it."""
    monkeypatch.setattr(attention_staged, "KERNEL", request.param.removesuffix("_inner"))
    monkeypatch.setitem(PFFN, "inner_residual", request.param.endswith("_inner"))


def lengths(batch, longest, seed=0):
    sizes = torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
    sizes[batch // 2], sizes[-1] = 0, longest
    return sizes


def run(queries, keys, more=None, own=True, **fields):
    t, options = arguments((queries, keys), device="cuda", **{"d": 128, "dtype": BF16} | fields)
    if own:
        t["residual"] = t["q_THd"]
    return check_op("norm_attention", t, options | PFFN | (more or {}), POLICY)


class Direct:
    """Backward of the PFFN without autograd: `run()` gives all gradients."""

    def __init__(self, queries, keys, H=4, seed=0):
        t, options = arguments(
            (queries, keys), H=H, d=128, dtype=BF16, pre="layer", post="rms", device="cuda", seed=seed
        )
        t = {n: v.detach() for n, v in t.items()}
        names = ("pre_norm_weight", "pre_norm_bias", "none", "none", "post_norm_weight", "none")
        parameters = [t.get(n) for n in names]
        spec = AttentionSpec(max(queries), max(keys), ("gelu",), False, options["scale"], False, None, "layer", "q",
                             "all_heads", "rms", PFFN["inner_residual"])  # fmt: skip
        self.problem = _problem(t["q_THd"], t["k_UHd"], parameters, True, spec, 1e-5, True)
        tensors = (t["q_THd"], t["k_UHd"], t["v_UHd"], t["q_offsets_B1"], t["k_offsets_B1"], *parameters)
        _, statistics = attention_staged.Staged().forward(self.problem, *tensors, t["q_THd"])
        self.saved, self.dout = (*tensors, *statistics), torch.randn_like(t["q_THd"])
        self.needs = (True, True, True, False, False, True, True, False, False, True, False, False)

    def run(self):
        grads = attention_staged.Staged().backward(self.problem, self.saved, (self.dout, self.dout), self.needs)
        return [g for g in grads if g is not None]


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("H", [1, 4])
def test_a4_empty_sequences(name, H):
    post = None if name.startswith("all") else "rms"  # a row that is 0 everywhere has no defined direction
    queries, keys = LENGTHS[name]
    scale = 20 if max(keys) <= 6 else 1  # of one or two tiny rows the rule knows only their rounding
    run([scale * n for n in queries], [scale * n for n in keys], H=H, pre="layer", post=post)


@pytest.mark.parametrize("H", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("longest", [64, 300])
def test_a8_heads(H, longest):
    run(lengths(6, longest), lengths(6, 128, 1), H=H, pre="layer", post="rms")
    run(lengths(6, longest), [128] * 6, H=H, pre="layer", post="rms")


@pytest.mark.parametrize("keys", [1, 64, 127, 128])
@pytest.mark.parametrize("queries", [1, 63, 64, 65, 192])
def test_block_edges(queries, keys):
    run([queries, 70, queries], [keys, 128, keys], pre="layer", post="rms")


@pytest.mark.parametrize("pre,post", [p for p in itertools.product([None, "rms", "layer"], repeat=2) if any(p)])
def test_norms_and_residuals(pre, post):
    for residual, affine, param_dtype in (("own", True, FP32), ("other", True, BF16), ("none", False, BF16)):
        run(lengths(5, 150), lengths(5, 90, 1), pre=pre, post=post, H=2, affine=affine, own=residual == "own",
            residual=residual == "other", param_dtype=param_dtype)  # fmt: skip


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activations(activation):
    for scale in (0.003, 0.09, 0.2):
        more = dict(activation=activation, scale=scale)
        run(lengths(6, 300), lengths(6, 128, 1), more, H=2, pre="layer", post="rms")


@pytest.mark.parametrize("change", ["zeros in gamma", "small", "mean"])
def test_other_data(change):
    t, options = arguments((lengths(6, 300), lengths(6, 128)), H=4, d=128, dtype=BF16, pre="layer", post="layer",
                           device="cuda")  # fmt: skip
    with torch.no_grad():
        if change == "zeros in gamma":
            t["pre_norm_weight"][::3] = 0
            t["post_norm_weight"][::2] = 0
        elif change == "small":
            t["q_THd"] *= 1e-3
        else:
            t["q_THd"] += 5
    t["residual"] = t["q_THd"]
    check_op("norm_attention", t, options | PFFN, POLICY)


@pytest.mark.parametrize("pre,post", [("layer", "rms"), (None, "layer"), ("rms", None)])
@pytest.mark.parametrize("slack", [1, 70])
def test_a5_rows_past_the_last_offset(pre, post, slack):
    t, options = arguments((lengths(6, 300), lengths(6, 128)), H=2, d=128, dtype=BF16, pre=pre, post=post,
                           residual=True, slack=slack, device="cuda")  # fmt: skip
    check_slack(t, options | PFFN, POLICY, slack, 3e-2)


@pytest.mark.parametrize("pre", ["layer", None])
@pytest.mark.parametrize("policy", [POLICY, SEPARATE])
def test_own_residual(pre, policy):
    """Also with NaN in the rows past the last offset, whose gradients are 0."""
    for slack in (0, 9):
        t, options = arguments((lengths(6, 300), lengths(6, 128)), H=4, d=128, dtype=BF16, pre=pre, post="rms",
                               device="cuda", slack=slack)  # fmt: skip
        if not slack:
            check_own_residual(t, options | PFFN, policy, 1e-2)
            continue
        y = ops.norm_attention(**t, residual=t["q_THd"], **options | PFFN, **policy)
        dy = torch.randn_like(y)
        dy[-slack:] = float("nan")
        dq, dk, dv = torch.autograd.grad(y, [t["q_THd"], t["k_UHd"], t["v_UHd"]], dy)
        assert not dq[-slack:].any() and all(g.isfinite().all() for g in (dq, dk, dv))


def test_a7_strided_keys_and_values():
    """Slices of one tensor, as the Kunlun PFFN has them, and 64-bit offsets."""
    t, options = arguments((lengths(6, 300), [128] * 6), H=4, d=128, dtype=BF16, pre="layer", post="rms", device="cuda")
    pair = torch.stack([t["k_UHd"].detach(), t["v_UHd"].detach()], 1)
    wide = torch.cat([t["q_THd"].detach()] * 2, 1)[:, :4]
    views = {"k_UHd": pair[:, 0].requires_grad_(), "v_UHd": pair[:, 1].requires_grad_(), "q_THd": wide.requires_grad_()}
    dy = torch.randn_like(t["q_THd"])
    found = []
    for tensors in (t, t | views):
        y = ops.norm_attention(**tensors, **options | PFFN, **POLICY)
        found.append(torch.autograd.grad(y, [v for v in tensors.values() if v.requires_grad], dy))
    for a, b in zip(*found):
        assert torch.equal(a, b)


def test_a20_only_some_gradients():
    t, options = arguments((lengths(6, 300), [128] * 6), H=2, d=128, dtype=BF16, pre="layer", post="rms", device="cuda")
    y = ops.norm_attention(**t, **options | PFFN, **POLICY)
    names = [n for n, v in t.items() if v.requires_grad]
    dy = torch.randn_like(y)
    every = dict(zip(names, torch.autograd.grad(y, [t[n] for n in names], dy)))
    for name in names:
        alone = {n: v.detach().requires_grad_(n == name) if n in names else v for n, v in t.items()}
        y = ops.norm_attention(**alone, **options | PFFN, **POLICY)
        torch.testing.assert_close(torch.autograd.grad(y, alone[name], dy)[0], every[name], rtol=1e-2, atol=1e-2)


def test_sequences_over_many_programs():
    for queries in ([20000, 1, 9000], [1] * 100 + [9000], [130] * 150):
        case = Direct(queries, [128 if n > 1 else 40 for n in queries], H=2)
        first = case.run()
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(first, case.run()))
    run([2000, 1, 900], [128, 40, 128], H=2, pre="layer", post="rms")


def test_many_sequences():
    """More than the 512 that the search for a program's range takes in at once."""
    run(lengths(700, 40), lengths(700, 20, 1), H=2, pre="layer", post="rms")


@pytest.mark.parametrize("heads", [1, 4, 16])
def test_a18_a26_equal_bits(heads):
    case = Direct(lengths(200, 700), [128] * 200, H=heads)
    first = case.run()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        for a, b in zip(first, case.run()):
            different += (a != b).sum()
    assert not different.item()


def test_a_captured_graph_gives_equal_bits():
    case = Direct(lengths(60, 700), [128] * 60)
    expected = case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.run()
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(expected, found))
