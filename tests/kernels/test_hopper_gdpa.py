"""The Hopper backward of jagged attention without a GPU: which tensors it takes, and what it hands to its kernel."""

import pytest
import torch

from recsys_norm.kernels.hopper import gdpa_backward, launch
from recsys_norm.ops.activations import get

GELU = get("gelu").code


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    monkeypatch.setattr(launch, "_driver_version", lambda: 13000)
    launch.why_not.cache_clear()
    yield
    launch.why_not.cache_clear()


def tensors(T=70, U=40, heads=2, d=128, dtype=torch.bfloat16):
    return tuple(torch.randn(rows, heads, d).to(dtype) for rows in (T, U, U, T))


def fits(q, k, v, grad, code=GELU, max_keys=128, arch=90):
    return gdpa_backward.fits((q, k, v, grad), 3, code, max_keys, arch)


def test_what_it_takes():
    q, k, v, grad = tensors()
    assert fits(q, k, v, grad) and fits(q, k, v, grad, get("gelu_tanh").code) and fits(*tensors(T=1, heads=1))
    assert not fits(q, k, v, grad, get("silu").code)
    assert not fits(q, k, v, grad, max_keys=129)
    assert not fits(q, k, v, grad, arch=80)
    assert not fits(*tensors(dtype=torch.float16)) and not fits(*tensors(d=64))


def test_which_strides_it_takes():
    q, k, v, grad = tensors()
    pair = torch.stack([k, v], 1)
    assert fits(q, pair[:, 0], pair[:, 1], grad)
    assert fits(torch.cat([q, q], 1)[:, 1:3], k, v, grad)
    assert not fits(q, k, v, grad[:1].expand(grad.shape))
    assert not fits(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, grad)
    shifted = torch.cat([q.new_zeros(1), q.flatten()])[1:].view_as(q)
    assert not fits(shifted, k, v, grad)


def test_rows():
    pair = torch.randn(5, 2, 4, 128)
    rows = gdpa_backward.as_matrix(pair[:, 1])
    assert torch.equal(rows, pair[:, 1].flatten(1)) and rows.data_ptr() == pair[:, 1].data_ptr()


@pytest.mark.parametrize("T,U", [(70, 40), (0, 40), (70, 0), (100_000, 40)])
def test_what_the_kernel_gets(T, U, monkeypatch):
    calls = []
    monkeypatch.setattr(launch, "get", lambda name: lambda *a, **options: calls.append((name, a, options)))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    q, k, v, grad = tensors(T, U)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    offsets = torch.tensor([0, 1, T]), torch.tensor([0, 1, U])
    gdpa_backward.backward((q, k, v, grad, *grads), *offsets, GELU, 100, 0.5)
    ((name, (programs, *args), options),) = calls
    entry = launch.manifest()["90"]["kernels"][name]
    assert len(args) == len(entry["params"]) and options == {"cooperative": True}
    for parameter, a in zip(entry["params"], args):
        if parameter["kind"] == "tile":
            assert a.dim() == 2 and a.shape[0] > 0 and a.shape[1] == 256 and a.stride(1) == 1
        elif parameter["kind"] == "pointer":
            assert isinstance(a, torch.Tensor)
        else:
            assert not isinstance(a, torch.Tensor)
    named = dict(zip((p["name"] for p in entry["params"]), args))
    assert named["q_step"] == 2 and named["most"] == 100 and named["half_scale"] == 0.25 and named["pitch"] == 256
    assert programs == (132 if T == 100_000 else 1 if T == 0 else 2 * (T + 128) // 192)
    assert named["sums_ptr"].shape[0] == programs
    flags = next(a for name, a in named.items() if name.startswith("flags"))
    assert flags.dtype == torch.int32 and flags.numel() == 2 * 132 and not flags.any()


def test_every_activation_has_a_kernel_that_fits():
    kernels = launch.manifest()["90"]["kernels"]
    for activation in gdpa_backward.ACTIVATIONS.values():
        kernel = kernels[f"gdpa_backward_{activation}_bf16"]
        assert kernel["cluster"] == 1 and kernel["spills"] == 0
