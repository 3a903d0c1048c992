"""The Hopper attention forward without a GPU: what it refuses, how it is called, and that its kernels fit."""

import itertools

import pytest
import torch

from recsys_norm.kernels.hopper import attention, launch
from recsys_norm.ops import registry
from recsys_norm.ops.problem import AttentionSpec, Problem

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPEC = dict(
    max_q_len=300, max_k_len=128, activation=("gelu_tanh",), softmax=False, scale=0.1, causal=False, window=None
)
SPEC |= dict(pre_norm="layer", pre_norm_on="q", pre_norm_scope="all_heads", post_norm="rms", inner_residual=True)


def problem(**fields):
    spec = {n: fields.pop(n) for n in list(fields) if n in SPEC}
    values = dict(
        op="norm_attention", norm="rms", M=100, K=512, N=512, H=4, d=128, dtype=BF16, param_dtype=FP32, eps=1e-5
    )
    values |= dict(affine=True, residual="after", training=True, device="cuda", arch=90, triton_version=(3, 6))
    return Problem(**values | dict(attention=AttentionSpec(**SPEC | spec)) | fields)


@pytest.fixture
def driver(monkeypatch):
    """A driver that supports CUDA 13.0, on machines without one."""
    monkeypatch.setattr(launch, "_driver_version", lambda: 13000)
    launch.why_not.cache_clear()
    yield
    launch.why_not.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """Launches, as (name, cluster size, grid, arguments by parameter)."""
    made = []

    def record(kernel, grid, *args):
        names = [p["name"] for p in kernel.entry["params"]]
        assert len(names) == len(args)
        made.append((kernel.name, kernel.entry["cluster"], grid, dict(zip(names, args))))

    monkeypatch.setattr(launch.Kernel, "__call__", record)
    monkeypatch.setattr(attention, "clusters", lambda kernel, device: 66)
    return made


def tensors(T=100, U=256, H=4, dtype=BF16, param=FP32):
    """k and v as halves of one projection."""
    kv = torch.randn(U, 2, H, 128).to(dtype)
    vector = torch.ones(H * 128, dtype=param)
    offsets = torch.tensor([0, T // 2, T])
    return [torch.randn(T, H, 128).to(dtype), kv[:, 0], kv[:, 1], offsets, offsets.int(), vector, vector, None, None,
            vector, None]  # fmt: skip


def test_it_is_registered():
    assert ("flashnorm", "hopper") in {(t.name, t.provider) for t in registry.techniques("norm_attention")}


@pytest.mark.parametrize(
    "fields,reason",
    [
        ({}, None),
        ({"dtype": FP16, "H": 1, "max_k_len": 1, "pre_norm": None, "training": False}, None),
        ({"H": 8, "pre_norm_on": "qk", "pre_norm_scope": "head", "activation": ("relu",) * 8}, None),
        ({"training": False, "triton_version": None}, None),
        ({"op": "norm_linear", "attention": None}, "serves norm_attention"),
        ({"device": "cpu"}, "tensors are on cpu"),
        ({"arch": 80}, "compute capability 9.0"),
        ({"dtype": FP32}, "bfloat16 and float16, not torch.float32"),
        ({"d": 64}, "heads are 128 wide and these are 64"),
        ({"H": 9}, "8 heads and there are 9"),
        ({"softmax": True}, "softmax is not"),
        ({"causal": True}, "causal=True"),
        ({"window": 20}, "window=20"),
        ({"max_k_len": 129}, "max_k_len is 129"),
        ({"M": 2**31 - 1}, "q has 2147483647"),
        ({"triton_version": None}, "it needs triton"),
        ({"training": False, "pre_norm_on": "k", "triton_version": None}, "it needs triton"),
    ],
)
def test_it_says_what_it_cannot_do(fields, reason, driver):
    found = attention.FlashNorm().why_not(problem(**fields))
    assert found is None if reason is None else reason in found


def test_every_problem_has_a_kernel_that_fits_twice():
    activations = [(n,) for n in ("gelu", "gelu_tanh", "silu")] + [("gelu", "relu")]
    for activation, dtype, heads in itertools.product(activations, (BF16, FP16), (1, 2, 8)):
        kernel = attention.kernel_for(activation, dtype, heads)
        assert kernel.entry["cluster"] == heads and kernel.entry["spills"] == 0
        assert 2 * (kernel.entry["shared"] + 1024) <= 228 * 1024
        assert 2 * kernel.entry["num_warps"] * 32 * kernel.entry["registers"] <= 65536


def test_what_a_call_passes(calls):
    t = tensors()
    (out,), saved = attention.forward(problem(), *t, t[0])
    (name, cluster, grid, args), = calls  # fmt: skip
    assert name == "attention_gelu_tanh_bf16_4" and cluster == 4 and grid == 4 * 2
    assert args["q_desc"].data_ptr() == t[0].data_ptr() and args["q_desc"].shape == (100, 512)
    assert args["k_desc"].data_ptr() == t[1].data_ptr() and args["k_desc"].stride() == (1024, 1)
    assert args["v_desc"].data_ptr() == t[2].data_ptr()
    assert (args["pre"], args["post"], args["per_head"], args["inner"]) == (2, 1, 0, 1)
    assert args["residual"] == attention.OWN_RESIDUAL and args["narrow"] == 0 and args["codes"] == 0x5555
    assert (args["q_stride"], args["k_stride"]) == (2, 1)
    q_mean, q_rstd, k_mean, k_rstd, o_mean, o_rstd, hat = saved
    assert q_mean.shape == q_rstd.shape == o_rstd.shape == (100,) and hat.shape == out.shape
    assert k_mean is None and k_rstd is None and o_mean is None


def test_calls_differ_where_the_problem_does(calls):
    t = tensors(dtype=FP16, param=FP16, H=2)
    other = torch.randn(100, 2, 128).half()
    p = problem(dtype=FP16, H=2, K=256, N=256, pre_norm_scope="head", training=False, activation=("relu", "silu"))
    _, saved = attention.forward(p, *t, other)
    (name, cluster, _, args), = calls  # fmt: skip
    assert name == "attention_general_fp16_4" and cluster == 2
    assert args["residual"] == attention.OTHER_RESIDUAL and args["residual_ptr"].data_ptr() == other.data_ptr()
    assert args["per_head"] == 1 and args["narrow"] == 1 and args["codes"] == 0x61 and args["hat_ptr"] is None
    assert saved[0].shape == (100, 2) and saved[6] is None


def test_no_keys_and_no_sequences(calls):
    t = tensors(U=0)
    attention.forward(problem(), *t, None)
    assert calls[0][3]["k_desc"].shape == (100, 512)  # TMA takes no empty tensor
    t[3] = t[4] = torch.zeros(1, dtype=torch.int64)
    (out,), saved = attention.forward(problem(), *t, None)
    assert len(calls) == 1 and not out.any() and not saved[6].any()


def test_its_backward_is_that_of_separate(monkeypatch):
    from recsys_norm.kernels.norm import attention as separate

    monkeypatch.setattr(separate, "backward", lambda *args: args)
    given = (problem(), ("saved",), ("dout", "add"), (True,) * 12)
    assert attention.FlashNorm().backward(*given) == given


def test_rows_are_views_where_tma_can_read_them():
    wide = torch.randn(50, 3, 4, 128).bfloat16()
    view = attention.as_rows(wide[:, 1])
    assert view.data_ptr() == wide[:, 1].data_ptr() and view.shape == (50, 512) and view.stride() == (1536, 1)
    for x in (
        wide[:, :, 1],
        wide.transpose(1, 2)[:, :, 0, :],
        wide[:1, 1].expand(50, -1, -1),
        wide.flip(0)[:, 0, :, :],
    ):
        rows = attention.as_rows(x)
        assert torch.equal(rows, x.reshape(rows.shape))
        assert rows.data_ptr() % 16 == 0 and rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]


def test_parameters_of_two_dtypes_become_fp32():
    vectors, narrow = attention._vectors((torch.ones(8), torch.ones(8).bfloat16(), None), BF16)
    assert narrow == 0 and [None if v is None else v.dtype for v in vectors] == [FP32, FP32, None]
