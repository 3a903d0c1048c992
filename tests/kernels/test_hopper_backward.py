"""The Hopper backward without a GPU: how the rows of a weight gradient are divided, and what the kernels refuse."""

import pytest
import torch

from recsys_norm.kernels.hopper import backward, dgrad, launch, wgrad
from recsys_norm.kernels.hopper.dgrad import tma_ready


@pytest.mark.parametrize("M", [1, 64, 65, 8192, 262144, (1 << 31) - 200])
@pytest.mark.parametrize("N,K", [(8, 8), (256, 256), (384, 384), (760, 1128), (2048, 512), (2048, 2048), (8192, 8192)])
def test_every_row_belongs_to_one_split(M, N, K):
    p = wgrad.plan(M, N, K, 132)
    assert p.steps * wgrad.STEP >= M > (p.steps - 1) * wgrad.STEP
    assert p.per_split * p.splits >= p.steps > p.per_split * (p.splits - 1)  # none is empty
    assert p.tiles * wgrad.TILE_ROWS * p.columns >= N * K
    assert p.splits == 1 or p.tiles * p.splits <= 132


def test_three_tiles_of_128_columns_are_two_of_192():
    assert wgrad.plan(262144, 384, 384, 132).columns == 192
    assert wgrad.plan(262144, 512, 512, 132).columns == 256


def test_what_it_refuses():
    assert backward.why_not(torch.bfloat16, 512, 512) is None
    assert backward.why_not(torch.float16, 8, 8192) is None
    assert "float32" in backward.why_not(torch.float32, 512, 512)
    assert "20 in-features" in backward.why_not(torch.bfloat16, 20, 512)
    assert "x has 8200" in backward.why_not(torch.bfloat16, 8200, 512)


def test_tma_gets_a_copy_of_what_it_cannot_read():
    wide = torch.randn(16, 40).bfloat16()
    assert tma_ready(wide[:, 8:24]).data_ptr() == wide[:, 8:24].data_ptr()
    for view in (wide[:, 1:17], wide.t(), wide[:, ::5], wide[:1].expand(16, -1)):
        ready = tma_ready(view)
        assert torch.equal(ready, view)
        assert ready.data_ptr() % 16 == 0 and ready.stride(1) == 1
        assert ready.stride(0) % 8 == 0 and ready.stride(0) >= ready.shape[1]


@pytest.mark.parametrize("variants", [(), ("RESIDENT", "MULTICAST_ROWS", "MULTICAST_WEIGHT")])
def test_every_form_has_a_kernel(variants, monkeypatch):
    for name in variants:
        monkeypatch.setattr(dgrad, name, True)
    kernels = launch.manifest()["90"]["kernels"]
    for K in (8, 128, 136, 256, 264, 384, 392, 512, 520, 8192):
        for N in (8, 256, 264, 2048):
            for whole in (True, False) if K <= 512 else (False,):
                form = dgrad.form_of(K, N, whole)
                cluster = 2 if form in ("384", "512", "384a", "512a", "any2") else 1
                for norm in ("rms", "layer"):
                    for dtype in ("bf16", "fp16"):
                        assert kernels[f"dx_{norm}_{dtype}_{form}"]["cluster"] == cluster
    with pytest.raises(ValueError, match="rows of 520 exceed the 512"):
        dgrad.form_of(520, 8, True)


def test_no_kernel_spills():
    kernels = launch.manifest()["90"]["kernels"]
    mine = {n: k for n, k in kernels.items() if k["module"] in ("dgrad_kernels", "wgrad_split_kernels")}
    assert len(mine) > 20
    assert {n: k["spills"] for n, k in mine.items() if k["spills"]} == {}
