"""The staged backward of norm_attention without a GPU: what it takes, what its kernels get, and what the PTX written by
hand does to tiles, by a model of it."""

import itertools

import numpy as np
import pytest
import torch
from ptx_model import Machine, swizzled, to_bf16, unswizzled

from recsys_norm.kernels.hopper import attention_staged, attention_staged_moves, gdpa_backward_moves, launch
from recsys_norm.ops.problem import AttentionSpec, Problem

BF16 = torch.bfloat16
TERMS, VECTORS = 1 << 16, 4096  # places of shared and of global memory


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    monkeypatch.setattr(launch, "_driver_version", lambda: 13000)
    launch.why_not.cache_clear()
    yield
    launch.why_not.cache_clear()


def problem(M=70, H=2, d=128, **fields):
    spec = dict(max_q_len=50, max_k_len=128, activation=("gelu",), softmax=False, scale=0.5, causal=False, window=None)
    spec |= dict(pre_norm="layer", pre_norm_on="q", pre_norm_scope="all_heads", post_norm="rms", inner_residual=False)
    spec |= {k: fields.pop(k) for k in list(fields) if k in spec}
    values = dict(
        op="norm_attention", norm="rms", M=M, K=H * d, N=H * d, dtype=BF16, param_dtype=BF16, eps=1e-5, H=H, d=d
    )
    values |= dict(device="cuda", arch=90, triton_version=(3, 6), training=True) | fields
    return Problem(**values, attention=AttentionSpec(**spec))


# ---- what it takes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [
    {}, dict(H=16), dict(H=1), dict(activation=("gelu_tanh",)), dict(pre_norm=None), dict(post_norm=None),
    dict(pre_norm="rms", post_norm="layer"), dict(activation=("gelu", "gelu")), dict(residual="after"),
    dict(inner_residual=True),
])  # fmt: skip
def test_what_it_takes(fields):
    assert attention_staged.Staged().why_not(problem(**fields)) is None


@pytest.mark.parametrize("fields,reason", [
    (dict(dtype=torch.float16), "bfloat16"), (dict(d=64), "128 wide"), (dict(H=17), "16 heads"),
    (dict(softmax=True), "softmax"), (dict(activation=("silu",)), "silu"), (dict(activation=("gelu", "silu")), "silu"),
    (dict(causal=True), "causal=True"), (dict(window=5), "window=5"), (dict(max_k_len=129), "129"),
    (dict(pre_norm_on="k"), "not of k"), (dict(pre_norm_scope="head"), "head"),
    (dict(M=1 << 28, H=4), "1073741824"), (dict(arch=80), "8.0"), (dict(device="cpu"), "cpu"),
])  # fmt: skip
def test_what_it_does_not_take(fields, reason):
    assert reason in attention_staged.Staged().why_not(problem(**fields))


def test_the_other_kernel_has_no_inner_residual(monkeypatch):
    monkeypatch.setattr(attention_staged, "KERNEL", "attention_staged")
    assert "no inner residual" in attention_staged.Staged().why_not(problem(inner_residual=True))


# ---- what its kernels get --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["attention_ahead", "attention_ahead_inner", "attention_staged"])
@pytest.mark.parametrize("pre,post", list(itertools.product([None, "rms", "layer"], repeat=2)))
def test_what_the_kernels_get(pre, post, kernel, monkeypatch):
    calls = {}
    monkeypatch.setattr(attention_staged, "KERNEL", kernel.removesuffix("_inner"))
    monkeypatch.setattr(launch, "get", lambda name: lambda *a, **options: calls.update({name: (a, options)}))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    p = problem(pre_norm=pre, post_norm=post, inner_residual=kernel.endswith("_inner"))
    q, dout, hat = (torch.randn(70, 2, 128).to(BF16) for _ in range(3))
    k, v = torch.randn(40, 2, 2, 128).to(BF16).unbind(1)
    offsets = torch.tensor([0, 1, 70]), torch.tensor([0, 1, 40])
    pre_parameters = [torch.randn(256) if pre else None for _ in range(2)]
    q_mean, q_rstd = torch.randn(70) if pre == "layer" else None, torch.randn(70) if pre else None
    o_rstd = torch.randn(70) if post else None
    saved = (q, k, v, *offsets, *pre_parameters, None, None, torch.randn(256) if post else None, None)
    saved += (q_mean, q_rstd, None, None, None, o_rstd, hat if post else None)
    terms = attention_staged.row_terms(p, saved, dout)
    grads = attention_staged.attend_backward(p, saved, terms)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert set(calls) == {"row_terms_256", f"{kernel}_gelu_bf16"}
    for name, ((programs, *args), options) in calls.items():
        entry = launch.manifest()["90"]["kernels"][name]
        assert len(args) == len(entry["params"]) and options == ({"cooperative": True} if kernel in name else {})
        for parameter, a in zip(entry["params"], args):
            if parameter["kind"] == "tile":
                assert a.dim() == 2 and a.shape[1] == 256 and a.stride(1) == 1
            elif parameter["kind"] == "pointer":
                assert a is None or isinstance(a, torch.Tensor)
            else:
                assert isinstance(a, (int, float)), parameter
        named = dict(zip((x["name"] for x in entry["params"]), args))
        if kernel in name:
            assert (named["o_rstd_ptr"], named["rstd_ptr"], named["mean_ptr"]) == (o_rstd, q_rstd, q_mean)
            assert named["q_step"] == 2 and named["most"] == 128 and named["half_scale"] == 0.25
            assert (named["batch"], named["heads"], named["T"], named["U"], named["q_pitch"]) == (2, 2, 70, 40, 256)
            assert (
                programs == 2 * (70 + 128) // 192 and named["hat_desc"].data_ptr() == (hat if post else dout).data_ptr()
            )
        else:
            assert named["T"] == (70 if post else 0) and named["last"] == 4 and named["layer"] == (post == "layer")
            assert named["narrow"] == (0 if pre or post else 1) and programs == (35 if post else 1)


# ---- tiles -----------------------------------------------------------------------------------------------------------


def values(*shape, seed=0):
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return to_bf16(x).astype(np.uint16)


def numbers(words):
    return (words.astype(np.uint32) << 16).view(np.float32)


def run(function, machine, names, inputs):
    text = getattr(
        attention_staged_moves if hasattr(attention_staged_moves, function) else gdpa_backward_moves, function
    )
    machine.run(text.fn((), inputs), names)


def machine():
    return Machine(np.zeros(1 << 17, np.uint8), np.zeros(1 << 20, np.uint8))


def put(memory, at, array):
    data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    memory[at : at + data.size] = data


def test_q_is_normalised():
    m, q = machine(), values(64, 128)
    r, shift = (np.random.default_rng(i).standard_normal(64).astype(np.float32) for i in (1, 2))
    weight, bias = (np.random.default_rng(i).standard_normal(128).astype(np.float32) for i in (3, 4))
    terms = np.full((64, 8), np.nan, np.float32)
    terms[:, 4], terms[:, 5] = r, shift
    put(m.shared, 8192, swizzled(q)), put(m.shared, TERMS, terms)
    put(m.memory, VECTORS, weight), put(m.memory, VECTORS + 512, bias)
    names = {"T": 8192, "F": TERMS, "W": VECTORS, "B": VECTORS + 512, "Z": 0}
    run("_normalise", m, names, (("T",), ("F",), ("W",), ("B",), ("Z",)))
    expected = (numbers(q) * r[:, None] + shift[:, None]) * weight + bias
    found = numbers(unswizzled(m.shared[8192 : 8192 + 16384]))
    assert np.abs(found - expected).max() <= 2.0**-8 * np.abs(expected).max()
    assert np.mean(found == numbers(to_bf16(expected).astype(np.uint16))) > 0.99  # the rest: one more rounding in fp32


def test_the_gradient_goes_through_the_post_norm():
    m, dout, hat = machine(), values(64, 128, seed=1), values(64, 128, seed=2)
    terms = np.random.default_rng(3).standard_normal((64, 8)).astype(np.float32)
    weight = np.random.default_rng(4).standard_normal(128).astype(np.float32)
    put(m.shared, 0, swizzled(dout)), put(m.shared, 16384, swizzled(hat)), put(m.shared, TERMS, terms)
    put(m.memory, VECTORS, weight)
    names = {"D": 0, "H": 16384, "F": TERMS, "W": VECTORS, "Z": 0}
    run("_differentiate", m, names, (("D",), ("H",), ("F",), ("W",), ("Z",)))
    expected = numbers(dout) * weight * terms[:, :1] + terms[:, 1:2] + numbers(hat) * terms[:, 2:3]
    found = numbers(unswizzled(m.shared[:16384]))
    assert np.abs(found - expected).max() <= 2.0**-8 * np.abs(expected).max()
    assert np.mean(found == numbers(to_bf16(expected).astype(np.uint16))) > 0.99
    assert (unswizzled(m.shared[16384:32768]) == hat).all()


@pytest.mark.parametrize("rows", [64, 37, 1])
@pytest.mark.parametrize(
    "pre,mean,post", [(True, True, True), (True, False, True), (False, False, True), (True, True, False)]
)
def test_terms_of_rows(rows, pre, mean, post):
    """`mean` is relative to the row's first element; without a norm a row stays what it is."""
    m, first, T, pitch = machine(), 11, 80, 384
    g = np.random.default_rng(0)
    o_rstd, r, mu = (g.standard_normal(T).astype(np.float32) for _ in range(3))
    means, q = g.standard_normal((T, 2)).astype(np.float32), values(T, pitch)
    places = dict(zip(("O", "M", "R", "A", "Q"), (1024, 4096, 8192, 12288, 65536)))
    for place, array in zip(places.values(), (o_rstd, means, r, mu, q)):
        put(m.memory, place, array)
    names = places | {"F": TERMS, "I": first, "N": rows, "P": pitch, "Z": 0}
    names |= {} if post else {"O": 0}
    names |= {} if pre else {"R": 0}
    names |= {} if mean else {"A": 0}
    run("_take_terms", m, names, tuple((x,) for x in ("F", "I", "N", "O", "M", "R", "A", "Q", "P", "Z")))
    found = m.shared[TERMS : TERMS + 2048].view(np.float32).reshape(64, 8)[:rows]
    at = slice(first, first + rows)
    s = o_rstd[at] if post else np.ones(rows, np.float32)
    scale = r[at] if pre else np.ones(rows, np.float32)
    centre = numbers(q[at, 0]) + mu[at] if mean else np.zeros(rows, np.float32)
    expected = np.stack([s, *(s * (means[at, i] if post else 0) for i in range(2)), 0 * s, scale, -centre * scale], 1)
    np.testing.assert_allclose(found[:, :6], expected, rtol=1e-6)
    assert np.isfinite(m.shared[TERMS : TERMS + 2048].view(np.float32)).all()
    run("_expect_terms", m, names, tuple((x,) for x in ("I", "N", "O", "M", "R", "A", "Q", "P", "Z")))
    read = [(names[x], size) for x, size in (("O", 4), ("M", 8), ("R", 4), ("A", 4), ("Q", 2 * pitch))]
    there = [bool(p) for p, _ in read[:4]] + [mean]
    assert m.prefetched == [
        {p + size * (first + i) for i in range(rows)} if t else set() for (p, size), t in zip(read, there)
    ]


@pytest.mark.parametrize("apart", [False, True])
def test_accumulators_go_to_panels(apart):
    """A thread of an accumulator holds, for every 8 columns, two neighbours each of its rows r and r + 8."""
    m, tile = machine(), np.arange(64 * 128, dtype=np.float32).reshape(64, 128) % 251
    names, registers = {"A": 0, "B": 40960, "Z": 0}, []
    thread = np.arange(128)
    row = 16 * (thread // 32) + thread % 32 // 4
    for i in range(64):
        j, low, odd = i // 4, i % 4 // 2, i % 2
        names[f"v{i}"] = tile[row + 8 * low, 8 * j + 2 * (thread % 4) + odd].view(np.uint32).astype(np.int64)
        registers.append(f"v{i}")
    inputs = (("A",), ("B",), ("Z",), tuple(registers)) if apart else (("A",), ("Z",), tuple(registers))
    run("_keep_rows", m, names, inputs)
    right = 40960 if apart else 8192
    data = np.concatenate([m.shared[:8192], m.shared[right : right + 8192]])
    assert (numbers(unswizzled(data)) == tile).all()


@pytest.mark.parametrize("W", [0, 1])
def test_dz_waits_for_the_products_of_dq(W):
    m, dz, factor = machine(), values(64, 128), np.float32(0.37)
    put(m.shared, 16384, swizzled(dz))
    run("_copy_panel", m, {"S": 16384 + 8192 * W, "T": 40960, "Z": 0}, (("S",), ("T",), ("Z",)))
    tile = np.random.default_rng(5).standard_normal((64, 64)).astype(np.float32)
    names = {"P": 40960, "Z": 0, "F": factor.view(np.uint32).astype(np.int64)}
    thread, registers = np.arange(128), []
    row = 16 * (thread // 32) + thread % 32 // 4
    for i in range(32):
        j, low, odd = i // 4, i % 4 // 2, i % 2
        names[f"v{i}"] = tile[row + 8 * low, 8 * j + 2 * (thread % 4) + odd].view(np.uint32).astype(np.int64)
        registers.append(f"v{i}")
    run("_keep_sum", m, names, (("P",), ("Z",), ("F",), tuple(registers)))
    found = numbers(unswizzled(np.concatenate([m.shared[40960 : 40960 + 8192]] * 2)))[:, :64]
    expected = numbers(dz)[:, 64 * W : 64 * W + 64].astype(np.float64) + tile.astype(np.float64) * factor
    assert np.array_equal(found, numbers(to_bf16(expected.astype(np.float32)).astype(np.uint16)))


# ---- sums over rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("param_dtype", [BF16, torch.float32])
def test_sums_over_rows(norm, param_dtype):
    """In Triton's interpreter, with NaN in the rows past the last offset and 3 programs for 9 blocks of rows."""
    from recsys_norm.kernels.hopper.row_terms_kernels import row_terms_kernel

    T, D, programs = 20, 384, 3
    g = torch.Generator().manual_seed(0)
    dout, hat = (torch.randn(T, D, generator=g).to(BF16) for _ in range(2))
    dout[17:], hat[17:] = float("nan"), float("nan")
    parameters = [torch.randn(D, generator=g).to(param_dtype) for _ in range(3)]
    means, vectors = torch.full((T, 2), 7.0), torch.full((3, D), float("nan"))
    partial = torch.full((2, programs, D), float("nan"))
    offsets, flags = torch.tensor([0, 5, 17]), torch.full((601,), 3, dtype=torch.int32)
    row_terms_kernel[(programs,)](
        dout, hat, *parameters, offsets.view(torch.int32), means, vectors, partial, flags, dout.stride(0), hat.stride(0), 4,
        T, D, int(param_dtype == BF16), int(norm == "layer"), 1, 600, BLOCK=512, ROWS=2, STAGES=1,
    )  # fmt: skip
    x, h = dout[:17].float(), hat[:17].float()
    weight = parameters[0].float()
    c1 = (x * weight).mean(1) if norm == "layer" else torch.zeros(17)
    torch.testing.assert_close(means[:17], -torch.stack([c1, (x * weight * h).mean(1)], 1), rtol=1e-4, atol=1e-5)
    assert (means[17:] == 7).all()
    torch.testing.assert_close(partial.sum(1), torch.stack([(x * h).sum(0), x.sum(0)]), rtol=1e-4, atol=1e-4)
    assert not flags[:600].any() and flags[600] == 3
    assert torch.equal(vectors, torch.stack([parameters[i].float() for i in (1, 2, 0)]))
