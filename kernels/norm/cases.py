"""What the norm package ships, for the compile checks: every tile of the tables, plain and with everything on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from recsys_norm.kernels.activations import IDENTITY
from recsys_norm.kernels.compile import CompileCase
from recsys_norm.kernels.norm import backward, forward, terms
from recsys_norm.kernels.norm.configs import (
    SHIPPED_TILES,
    WIDE,
    Tile,
    backward_config,
    column_tile,
    forward_config,
    reduce_tile,
)
from recsys_norm.ops.activations import get

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def _types(names: str, dtype: str, param: str) -> dict[str, str]:
    """Triton types by parameter name, aligned as torch allocates."""
    types = {}
    for name in names.split():
        if name.endswith("_ptr"):
            statistics = name in ("mean_ptr", "rstd_ptr", "partial_ptr")
            parameter = name in ("weight_ptr", "bias_ptr")
            kind = "i32" if name == "offsets_ptr" else "fp32" if statistics else param if parameter else dtype
            types[name] = f"*{kind}:16"
        else:
            types[name] = "fp32" if name in ("eps", "reciprocal") else "i32"
    return types


_FORWARD = (
    "x_ptr before_ptr after_ptr weight_ptr bias_ptr offsets_ptr y_ptr z_ptr hat_ptr mean_ptr rstd_ptr "
    "M N stride_x stride_before stride_after last heads reciprocal eps"
)
_INPUTS = "dy_ptr z_ptr more_ptr dsum_ptr weight_ptr bias_ptr mean_ptr rstd_ptr offsets_ptr "
_SIZES = " M N stride_dy stride_z stride_more stride_dsum last heads"
_BACKWARD = f"{_INPUTS} dz_ptr h_ptr partial_ptr {_SIZES} reciprocal"
_BACKWARD_WIDE = f"{_INPUTS} dz_ptr h_ptr {_SIZES} reciprocal"
_COLUMNS = f"{_INPUTS} partial_ptr {_SIZES}"


def _norm(layer: bool, activation: str, dtype: str) -> dict[str, Any]:
    return dict(LAYER=layer, ACTIVATION=get(activation).code, FAST=dtype == "bf16", HAS_WEIGHT=True, HAS_BIAS=layer)


def _label(width, vec: int, dtype: str, param: str, layer: bool, full: bool) -> str:
    norm = "layer" if layer else "rms"
    return f"{width} {'aligned' if vec > 1 else 'scalar'} {dtype}/{param} {norm}" + (" full" if full else "")


def _forward(tile: Tile, dtype: str, param: str, layer: bool, full: bool, groups: int = 1) -> CompileCase:
    """Plain, or `full`: with both residuals, both extra outputs and cut rows (an activation comes without them)."""
    config = forward_config(tile.block, _BYTES[dtype])
    args = _types(_FORWARD, dtype, param) | _norm(layer, "identity", dtype) | dict(SHIFT=dtype == "fp32")
    args |= dict.fromkeys(("BEFORE", "AFTER", "CUT", "WRITE_Z", "WRITE_HAT"), full)
    args |= dict(GROUPS=groups, ROWS=config.rows, BLOCK=tile.block, VEC=tile.vec)
    label = _label(tile.block, tile.vec, dtype, param, layer, full)
    return CompileCase("norm.forward", label, forward.forward_kernel, args, {"num_warps": config.warps})


def _backward(tile: Tile, dtype: str, param: str, layer: bool, kind: str, groups: int = 1) -> CompileCase:
    """dz, dweight and dbias; with the other two outputs and both further gradients for "more", and gelu for
    "activation"."""
    config = backward_config(tile.block, _BYTES[dtype], "layer" if layer else "rms", kind)
    more = kind != "plain"
    args = _types(_BACKWARD, dtype, param) | _norm(layer, "gelu" if kind == "activation" else "identity", dtype)
    args |= dict(HAT=False, MORE=more, DSUM=more, CUT=more, WRITE_DZ=True, WRITE_H=more)
    args |= dict(SUM_WEIGHT=True, SUM_BIAS=layer, SUM_DZ=more, SHIFT=dtype == "fp32")
    args |= dict(GROUPS=groups)
    args |= dict(ROWS=config.rows, BLOCK=tile.block, VEC=tile.vec, STAGES=config.stages)
    label = f"{_label(tile.block, tile.vec, dtype, param, layer, False)} {kind}"
    return CompileCase("norm.backward", label, backward.backward_kernel, args, {"num_warps": config.warps})


def _backwards(tile: Tile, dtype: str, param: str, arch: int) -> Iterator[CompileCase]:
    """Every tile once, with the most that it is used for."""
    tiles: dict[tuple, str] = {}
    for kind in ("plain", "more", "activation"):
        config = backward_config(tile.block, _BYTES[dtype], "layer", kind)
        if config is not None:
            tiles[(kind == "plain", *config._replace(per_sm=0))] = kind
    for kind in tiles.values():
        if arch == 90 or kind != "plain" or len(tiles) == 1:
            yield _backward(tile, dtype, param, True, kind)


def _wide(dtype: str, param: str, layer: bool) -> Iterator[CompileCase]:
    vec = 16 // _BYTES[dtype]
    norm = _norm(layer, "gelu", dtype) | dict(CUT=True, VEC=vec)
    label = _label("wide", vec, dtype, param, layer, True)
    args = _types(_FORWARD, dtype, param) | norm | dict(BEFORE=True, AFTER=True, WRITE_Z=True, WRITE_HAT=True)
    args |= dict(CHUNK=WIDE.chunk)
    options = {"num_warps": WIDE.warps}
    yield CompileCase("norm.forward_wide", label, forward.forward_wide_kernel, args, options)
    args = _types(_BACKWARD_WIDE, dtype, param) | norm | dict(HAT=False, MORE=True, DSUM=True)
    args |= dict(WRITE_DZ=True, WRITE_H=True)
    args |= dict(CHUNK=WIDE.chunk)
    yield CompileCase("norm.backward_wide", label, backward.backward_wide_kernel, args, options)
    tile = column_tile(1 << 16)
    args = (
        _types(_COLUMNS, dtype, param) | norm | dict(HAT=False, MORE=True, DSUM=False, SUM_WEIGHT=True, SUM_BIAS=True)
    )
    args |= dict(ROWS=tile.rows, COLS=tile.cols, STAGES=tile.stages)
    yield CompileCase("norm.columns", label, backward.columns_kernel, args, {"num_warps": tile.warps})
    tile = column_tile(1 << 16, plain=True)
    args = args | dict.fromkeys(("LAYER", "HAS_WEIGHT", "HAS_BIAS", "MORE", "CUT", "SUM_WEIGHT"), False)
    args |= dict(ACTIVATION=IDENTITY.value, HAT=True, ROWS=tile.rows, COLS=tile.cols, STAGES=tile.stages)
    yield CompileCase("norm.columns", f"sum {dtype}", backward.columns_kernel, args, {"num_warps": tile.warps})


def _reduce(programs: int) -> CompileCase:
    tile = reduce_tile(programs)
    args = _types("partial_ptr first_ptr second_ptr third_ptr programs N", "fp32", "fp32")
    args |= dict(SUMS=3, ROWS=tile.rows, COLS=tile.cols, VEC=4)
    return CompileCase("norm.reduce", f"{programs} partials", backward.reduce_kernel, args, {"num_warps": tile.warps})


def _grouped(tile: Tile, dtype: str, param: str) -> Iterator[CompileCase]:
    """Rows of two groups, each with a weight of its own."""
    for case in (_forward(tile, dtype, param, True, False, 2), _backward(tile, dtype, param, True, "plain", 2)):
        yield replace(case, label=f"{case.label} in groups")


def _terms() -> CompileCase:
    args = _types(
        "x_ptr mean_ptr rstd_ptr weight_ptr bias_ptr rows_ptr columns_ptr M N stride_x row_blocks", "bf16", "bf16"
    )
    args |= {"rows_ptr": "*fp32:16", "columns_ptr": "*fp32:16"}
    args |= dict(LAYER=True, HAS_WEIGHT=True, HAS_BIAS=True, BLOCK=terms.BLOCK)
    return CompileCase("norm.terms", "bf16/bf16 layer", terms.terms_kernel, args, {"num_warps": terms.WARPS})


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Every tile for Hopper, those with the most registers for the others (tiles do not depend on the GPU); with
    everything on where that is shipped, since it holds the plain variant's values and more."""
    for dtype, param, blocks in (("bf16", "fp32", (512, 2048)), ("fp32", "fp32", (8192,))):
        for tile in SHIPPED_TILES[_BYTES[dtype]]:
            if arch == 90 or tile.block in blocks:
                yield _forward(tile, dtype, param, True, True)
                yield from _backwards(tile, dtype, param, arch)
    yield from _wide("fp32", "fp32", True)
    if arch == 90:
        yield from _grouped(Tile(512, 8), "bf16", "bf16")
        yield from _wide("bf16", "bf16", False)
        yield _reduce(1)
        yield _terms()
    yield _reduce(1000)
