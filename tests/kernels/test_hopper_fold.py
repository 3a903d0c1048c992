"""Centring of folded weights, the arithmetic alone in the interpreter (the kernel around it is shipped compiled)."""

import pytest
import torch
import triton
import triton.language as tl

from recsys_norm.kernels.hopper.fold_kernels import centred

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def centre_kernel(weight_ptr, out_ptr, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    keep = (rows < N)[:, None] & (cols < K)[None, :]
    at = rows[:, None] * K + cols[None, :]
    folded = tl.load(weight_ptr + at, mask=keep, other=0.0)
    tl.store(out_ptr + at, centred(folded, keep, cols, K, tl.float16), mask=keep)


@pytest.mark.parametrize("on_grid", [False, True])
@pytest.mark.parametrize("K", [8, 72, 384, 2048])
def test_centred_rows_sum_to_zero_and_stay_close(K, on_grid):
    """Also weights that are 16-bit numbers already, which all round the same way after a shift."""
    torch.manual_seed(0)
    weight = torch.randn(30, K, device=DEVICE) * K**-0.5 + 0.02
    weight = weight.half().float() if on_grid else weight
    out = torch.empty(30, K, device=DEVICE, dtype=torch.float16)
    centre_kernel[(2,)](weight, out, 30, K, ROWS=16, BLOCK=triton.next_power_of_2(K))
    exact = weight.double() - weight.double().mean(1, keepdim=True)
    unit = torch.finfo(torch.float16).eps
    size = exact.norm(dim=1)
    assert ((out.double() - exact).norm(dim=1) <= (1.2 if K < 100 else 0.75) * unit * size).all()
    assert (out.double().sum(1).abs() <= 0.02 * unit * size).all()
