"""What the norm package ships, for the compile checks: every tile of the tables, plain and with everything on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recsys_norm.kernels.compile import CompileCase
from recsys_norm.kernels.norm import backward, forward
from recsys_norm.kernels.norm.configs import (
    SHIPPED_TILES,
    WIDE,
    Tile,
    backward_config,
    column_tile,
    forward_config,
    reduce_tile,
)

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def _types(names: str, dtype: str, param: str) -> dict[str, str]:
    """Triton types by parameter name, aligned as torch allocates."""
    types = {}
    for name in names.split():
        if name.endswith("_ptr"):
            statistics = name in ("mean_ptr", "rstd_ptr", "rest_ptr", "partial_ptr")
            parameter = name in ("weight_ptr", "bias_ptr")
            types[name] = f"*{'fp32' if statistics else param if parameter else dtype}:16"
        else:
            types[name] = "fp32" if name == "eps" else "i32"
    return types


_FORWARD = (
    "x_ptr residual_ptr weight_ptr bias_ptr y_ptr z_ptr hat_ptr mean_ptr rstd_ptr "
    "M N stride_x stride_residual eps"
)
_BACKWARD = (
    "dy_ptr z_ptr dsum_ptr weight_ptr bias_ptr mean_ptr rstd_ptr dz_ptr h_ptr partial_ptr "
    "M N stride_dy stride_z stride_dsum"
)
_BACKWARD_WIDE = (
    "dy_ptr z_ptr dsum_ptr weight_ptr bias_ptr mean_ptr rest_ptr rstd_ptr dz_ptr h_ptr "
    "M N stride_dy stride_z stride_dsum"
)
_COLUMNS = "dy_ptr z_ptr weight_ptr bias_ptr mean_ptr rest_ptr rstd_ptr partial_ptr M N stride_dy stride_z"


def _norm(layer: bool, activation: str) -> dict[str, Any]:
    return dict(LAYER=layer, ACTIVATION=activation, HAS_WEIGHT=True, HAS_BIAS=layer)


def _label(width, vec: int, dtype: str, param: str, layer: bool, full: bool) -> str:
    norm = "layer" if layer else "rms"
    return f"{width} {'aligned' if vec > 1 else 'scalar'} {dtype}/{param} {norm}" + (" full" if full else "")


def _forward(tile: Tile, dtype: str, param: str, layer: bool, full: bool) -> CompileCase:
    """Plain, or `full`: with residual and both extra outputs (an activation comes without them)."""
    config = forward_config(tile.block, _BYTES[dtype])
    args = _types(_FORWARD, dtype, param) | _norm(layer, "identity")
    args |= dict(RESIDUAL=1 if full else 0, WRITE_Z=full, WRITE_HAT=full, REFINE=dtype == "fp32")
    args |= dict(ROWS=config.rows, BLOCK=tile.block, VEC=tile.vec, STAGES=config.stages)
    label = _label(tile.block, tile.vec, dtype, param, layer, full)
    return CompileCase("norm.forward", label, forward.forward_kernel, args, {"num_warps": config.warps})


def _backward(tile: Tile, dtype: str, param: str, layer: bool, full: bool) -> CompileCase:
    """dz, dweight and dbias, or `full`: with the other two outputs, the gradient of the sum and gelu."""
    config = backward_config(tile.block, _BYTES[dtype], full)
    args = _types(_BACKWARD, dtype, param) | _norm(layer, "gelu" if full else "identity")
    args |= dict(HAT=False, ADD_DSUM=full, WRITE_DZ=True, WRITE_H=full, SUM_WEIGHT=True, SUM_BIAS=layer, SUM_DZ=full)
    args |= dict(REFINE=dtype == "fp32" and layer)
    args |= dict(ROWS=config.rows, BLOCK=tile.block, VEC=tile.vec, STAGES=config.stages)
    label = _label(tile.block, tile.vec, dtype, param, layer, full)
    return CompileCase("norm.backward", label, backward.backward_kernel, args, {"num_warps": config.warps})


def _wide(dtype: str, param: str, layer: bool) -> Iterator[CompileCase]:
    vec = 16 // _BYTES[dtype]
    norm = _norm(layer, "gelu")
    label = _label("wide", vec, dtype, param, layer, True)
    refine = dtype == "fp32" and layer
    chunk = dict(CHUNK=WIDE.chunk, VEC=vec)
    args = _types(_FORWARD, dtype, param) | norm | dict(RESIDUAL=1, WRITE_Z=True, WRITE_HAT=True) | chunk
    options = {"num_warps": WIDE.warps}
    yield CompileCase("norm.forward_wide", label, forward.forward_wide_kernel, args, options)
    args = _types(_BACKWARD_WIDE, dtype, param) | norm | chunk
    args |= dict(HAT=False, ADD_DSUM=True, WRITE_DZ=True, WRITE_H=True, REFINE=refine)
    yield CompileCase("norm.backward_wide", label, backward.backward_wide_kernel, args, options)
    tile = column_tile(1 << 16)
    args = _types(_COLUMNS, dtype, param) | norm | dict(HAT=False, SUM_WEIGHT=True, SUM_BIAS=True, REFINE=refine)
    args |= dict(ROWS=tile.rows, COLS=tile.cols, VEC=vec)
    yield CompileCase("norm.columns", label, backward.columns_kernel, args, {"num_warps": tile.warps})


def _reduce(programs: int) -> CompileCase:
    tile = reduce_tile(programs)
    args = _types("partial_ptr first_ptr second_ptr third_ptr programs N", "fp32", "fp32")
    args |= dict(SUMS=3, ROWS=tile.rows, COLS=tile.cols)
    return CompileCase("norm.reduce", f"{programs} partials", backward.reduce_kernel, args, {"num_warps": tile.warps})


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Every tile for Hopper, those with the most registers for the others (tiles do not depend on the GPU); with
    everything on where that is shipped, since it holds the plain variant's values and more."""
    for dtype, param, blocks in (("bf16", "fp32", (512, 2048)), ("fp32", "fp32", (8192,))):
        for tile in SHIPPED_TILES[_BYTES[dtype]]:
            if arch == 90 or tile.block in blocks:
                yield _forward(tile, dtype, param, True, True)
                yield _backward(tile, dtype, param, True, backward_config(tile.block, _BYTES[dtype], True) is not None)
    yield from _wide("fp32", "fp32", True)
    if arch == 90:
        yield from _wide("bf16", "bf16", False)
        yield _reduce(1)
    yield _reduce(1000)
