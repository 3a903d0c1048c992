"""What the norm + GEMM kernels share: tile loads and stores, the matrix product, and descriptors on the host side.

A tile source is either a tensor descriptor (Hopper and newer, where base and strides are multiples of 16 bytes) or a
pointer with a row stride; one kernel serves both. Sizes are run-time arguments. The address of a tile is 64-bit and
offsets inside it are 32-bit; `near` sees to it that 256 rows span less than 2^31 values.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# The interpreter computes with numpy, which has no bf16, and has no inline assembly.
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_tile(source, row, col, rows, cols, stride, TMA: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Tile [BR, BC] at (row, col) of a [rows, cols] matrix, zero outside of it."""
    if TMA:
        tile = source.load([row, col])
    else:
        r = tl.arange(0, BR)
        c = tl.arange(0, BC)
        corner = source + (stride.to(tl.int64) * row + col)
        keep = (r < rows - row)[:, None] & (c < cols - col)[None, :]
        tile = tl.load(corner + (r[:, None] * stride + c[None, :]), mask=keep, other=0.0)
    return tile


@triton.jit
def store_tile(target, tile, row, col, rows, cols, TMA: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Write what lies inside a contiguous [rows, cols] matrix."""
    if TMA:
        target.store([row, col], tile)
    else:
        r = tl.arange(0, BR)
        c = tl.arange(0, BC)
        corner = target + (cols.to(tl.int64) * row + col)
        keep = (r < rows - row)[:, None] & (c < cols - col)[None, :]
        tl.store(corner + (r[:, None] * cols + c[None, :]), tile, mask=keep)


@triton.jit
def halves(tile, BR: tl.constexpr, BC: tl.constexpr):
    """Left and right half of a tile, without moving a value to another thread."""
    return tile.reshape((BR, 2, BC // 2)).permute((0, 2, 1)).split()


@triton.jit
def matmul(a, b, acc, PRECISION: tl.constexpr):
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """fp32 values in `dtype`, rounded to nearest even; the interpreter's own conversion to bf16 truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        value = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit
def finished(acc, WAIT: tl.constexpr):
    """The same value, used by no instruction: a use inside the loop makes the compiler wait for the asynchronous matrix
    product before the iteration ends, so that no operand slot is refilled while it is being read (see race_check)."""
    if WAIT and not INTERPRETED:
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 products are exact fp32 unless the user allows TF32, as in torch.nn.functional.linear."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def fits_descriptor(t: Tensor) -> bool:
    """Whether a 2-D tensor's base and row stride are multiples of 16 bytes, as TMA wants."""
    size = t.element_size()
    return t.data_ptr() % 16 == 0 and t.stride(1) == 1 and t.stride(0) * size % 16 == 0 and t.shape[1] * size >= 16


def near(t: Tensor) -> Tensor:
    """A matrix whose row stride leaves room for 32-bit offsets inside a tile."""
    return t if t.stride(0) < 2**22 else t.contiguous()


def descriptor(t: Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(t, [rows, cols])


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """SMs of the device; a small stand-in under the interpreter, where programs run one after another."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def architecture(t: Tensor) -> int:
    """Compute capability as an integer; under the interpreter that of Hopper, whose code paths are the longest."""
    if t.device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(t.device)
    return 10 * major + minor
