"""norm_linear backward on Hopper, gradient of x: one GEMM, the norm's backward in its epilogue (dgrad_kernels.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recsys_norm.kernels.hopper import launch
from recsys_norm.kernels.hopper.lazy import NAMES, aligned, tma_ready

TILE_ROWS = 128  # per CTA
STEP = 64
DOT_ROWS = 8
WHOLE_ROW_FORMS = (128, 256, 384, 512)  # longest rows of g that the accumulators of one or two CTAs hold
TILED_COLUMNS = 256
MAX_PIECES = 3
ALL_COLUMNS = 1 << 30


def fits_in_pieces(dy: Sequence[Tensor], K: int) -> bool:
    """Whether the kernels read this dy, of matrices side by side, where it lies; else it has to be put together."""
    widths = {t.shape[1] for t in dy}
    return len(dy) <= MAX_PIECES and len(widths) == 1 and not widths.pop() % STEP and K <= WHOLE_ROW_FORMS[-1]


def pieces(dy: Tensor | Sequence[Tensor]) -> tuple[list[Tensor], int, int]:
    """What the kernels take for dy: three matrices, the columns of each, and those of all."""
    given = [tma_ready(t) for t in ([dy] if isinstance(dy, Tensor) else dy)]
    width = given[0].shape[1]
    spare = given[:1] * (MAX_PIECES - len(given))  # not read
    return given + spare, width if len(given) > 1 else ALL_COLUMNS, width * len(given)


def form_of(K: int, whole: bool) -> str:
    """Which kernel of dgrad_kernels.py serves rows of K."""
    if not whole:
        return "any"
    limit = next((f for f in WHOLE_ROW_FORMS if f >= K), None)
    if limit is None:
        raise ValueError(f"rows of {K} exceed the {WHOLE_ROW_FORMS[-1]} that the accumulators hold; pass delta")
    return str(limit)


def dx(
    dy: Tensor | Sequence[Tensor],  # [M, N], bf16 or fp16; also as pieces side by side (`fits_in_pieces`)
    folded: Tensor,  # [N, K] contiguous: W' in dy's dtype, with centred rows for layer norm
    x: Tensor,  # [M, K]
    mean: Tensor | None,  # [M] fp32, relative to the row's first element; None for RMSNorm
    rstd: Tensor,  # [M] fp32
    delta: Tensor | None,  # [M] fp32: sum_k(g * xhat); None up to K = 512, where the kernel takes it itself
    add: Tensor | None = None,  # [M, K]
) -> Tensor:
    """dx = rstd * (g - xhat * mean_k(g * xhat)) + add with g = dy W', rounded once."""
    given, piece, N = pieces(dy)
    x = tma_ready(x)
    add = None if add is None else tma_ready(add)
    M, K = x.shape
    out = x.new_empty(M, K)
    form = form_of(K, delta is None)
    norm, extra = "rms" if mean is None else "layer", "" if add is None else "_add"
    kernel = launch.get(f"dx_{norm}_{NAMES[x.dtype]}_{form}{extra}")
    size = kernel.entry["cluster"]
    col_tiles = 1 if delta is None else -(-K // TILED_COLUMNS)
    row_tiles = -(-M // (TILE_ROWS * (size if form == "any" else 1)))
    tiles = row_tiles * col_tiles
    grid = size * min(tiles, launch.multiprocessors(x.device) // size)
    tensors = (folded, folded, x, x, out, out if add is None else add, x, mean, rstd, delta)
    kernel(grid, *given, piece, *tensors, x.stride(0), M, 1.0 / K, tiles, col_tiles, -(-N // STEP))
    return out


def row_dots(dy: Tensor, y: Tensor, offset: Tensor) -> Tensor:
    """[M] fp32: sum_n dy_mn (y_mn - offset_n), which is sum_k(g * xhat)."""
    M, N = dy.shape
    dy, y = tma_ready(dy), aligned(y.contiguous())
    delta = torch.empty(M, device=dy.device, dtype=torch.float32)
    launch.get(f"row_dots_{NAMES[dy.dtype]}")(-(-M // DOT_ROWS), dy, y, offset, delta, M, N, dy.stride(0))
    return delta
