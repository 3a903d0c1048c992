"""What the lazy package ships, for the compile and race checks: every configuration with the options it serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from recsys_norm.kernels.compile import CompileCase
from recsys_norm.kernels.lazy import backward, fold, forward, naive, stats, wgrad
from recsys_norm.kernels.lazy.configs import (
    COEFFICIENT_COLUMNS,
    NAIVE_MAX_FEATURES,
    GemmConfig,
    Kind,
    dx_config,
    forward_config,
    given_config,
    naive_config,
    wgrad_by_blas,
    wgrad_config,
)

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def source(name: str, tma: bool, aligned: bool, rows: int, cols: int) -> str:
    """Type of a tile source."""
    return f"tensordesc<{name}[{rows},{cols}]>" if tma else f"*{name}" + (":16" if aligned else "")


def fp32(*names: str) -> dict[str, str]:
    return {name: "*fp32:16" for name in names}


def ints(*names: str) -> dict[str, str]:
    return {name: "i32" for name in names}


def label(kind: Kind, *words: Any) -> str:
    return " ".join([NAMES[kind.dtype], "aligned" if kind.aligned else "odd", *map(str, words)])


def options(config: GemmConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def forward_case(kind: Kind, config: GemmConfig, layer: bool, even: bool = True) -> CompileCase:
    name, tma, full = NAMES[kind.dtype], config.tma and kind.aligned, kind.dtype == torch.float32
    half = config.BN // 2 if config.split_store else config.BN
    args = {
        "x": source(name, tma, kind.aligned, config.BM, config.BK),
        "weight": source(name, tma, kind.aligned, config.BN, config.BK),
        "y": source(name, tma, kind.aligned, config.BM, half),
        "x_ptr": source(name, False, kind.aligned, 0, 0),
        **fp32("colsum_ptr", "offset_ptr", "mean_ptr", "rstd_ptr", "scale_ptr"),
        **ints("M", "N", "K", "stride_x"),
        "eps": "fp32",
        "LAYER": layer,
        "HAS_OFFSET": True,
        "IN_LOOP": config.in_loop,
        "CENTRE": layer and full,
        "EVEN_K": even or not (layer and config.in_loop),
        "ALIGNED": kind.aligned,
        "TMA": tma,
        "WAIT": config.wait,
        "FLATTEN": config.flatten,
        "SPLIT_STORE": config.split_store,
        "PRECISION": "tf32" if kind.tf32 else "ieee",
        "BM": config.BM,
        "BN": config.BN,
        "BK": config.BK,
    }
    text = label(kind, "layer" if layer else "rms", config.BM, config.BN, config.BK, "even" if even else "masked")
    return CompileCase("lazy.forward", text, forward.forward_kernel, args, options(config))


def dx_case(kind: Kind, config: GemmConfig, layer: bool, whole: bool, emit_hat: bool) -> CompileCase:
    name, tma = NAMES[kind.dtype], config.tma and kind.aligned
    part = config.BN // 2 if config.split_store else config.BN
    result = source(name, tma, kind.aligned, config.BM, part)
    args = {
        "dy": source(name, tma, kind.aligned, config.BM, config.BK),
        "weight": source(name, tma, kind.aligned, config.BK, config.BN),
        "x": result,
        "dx": result,
        "hat": result,
        "x_ptr": source(name, False, kind.aligned, 0, 0),
        **fp32("mean_ptr", "rstd_ptr", "delta_ptr", "eta_ptr"),
        **ints("M", "N", "K", "stride_dy", "stride_x"),
        "LAYER": layer,
        "WHOLE": whole,
        "EMIT_HAT": emit_hat,
        "ALIGNED": kind.aligned,
        "TMA": tma,
        "WAIT": config.wait,
        "FLATTEN": config.flatten,
        "SPLIT": config.split_store,
        "PRECISION": "tf32" if kind.tf32 else "ieee",
        "BM": config.BM,
        "BK": config.BN,
        "BN": config.BK,
    }
    text = label(kind, "layer" if layer else "rms", "whole" if whole else "tiled", config.BM, config.BN, config.BK)
    return CompileCase("lazy.dx", text, backward.dx_kernel, args, options(config))


def wgrad_case(kind: Kind, config: GemmConfig, layer: bool) -> CompileCase:
    name, tma = NAMES[kind.dtype], config.tma and kind.aligned
    args = {
        "x": source(name, tma, kind.aligned, config.BM, config.BK),
        "dy": source(name, tma, kind.aligned, config.BM, config.BN),
        "x_ptr": source(name, False, kind.aligned, 0, 0),
        **fp32("partial_ptr", "mean_ptr", "rstd_ptr"),
        **ints("M", "N", "K", "stride_dy", "stride_x", "rows_per_split"),
        "LAYER": layer,
        "ALIGNED": kind.aligned,
        "TMA": tma,
        "WAIT": config.wait,
        "PRECISION": "tf32" if kind.tf32 else "ieee",
        "BM": config.BM,
        "BN": config.BN,
        "BK": config.BK,
    }
    text = label(kind, "layer" if layer else "rms", config.BM, config.BN, config.BK)
    return CompileCase("lazy.wgrad", text, wgrad.wgrad_kernel, args, options(config))


def naive_case(kind: Kind, config: GemmConfig, layer: bool) -> CompileCase:
    name, tma = NAMES[kind.dtype], config.tma and kind.aligned
    args = {
        "x_ptr": source(name, False, kind.aligned, 0, 0),
        "weight": source(name, tma, kind.aligned, config.BN, config.BK),
        "y": source(name, tma, kind.aligned, config.BM, config.BN),
        **{f"{p}_ptr": f"*{name}:16" for p in ("gamma", "beta", "bias")},
        **fp32("mean_ptr", "rstd_ptr"),
        **ints("M", "N", "K", "stride_x"),
        "eps": "fp32",
        "LAYER": layer,
        "HAS_GAMMA": True,
        "HAS_BETA": layer,
        "HAS_BIAS": True,
        "ALIGNED": kind.aligned,
        "TMA": tma,
        "PRECISION": "tf32" if kind.tf32 else "ieee",
        "BM": config.BM,
        "BN": config.BN,
        "BK": config.BK,
    }
    text = label(kind, "layer" if layer else "rms", config.BM, config.BN, config.BK)
    return CompileCase("lazy.naive", text, naive.naive_kernel, args, options(config))


def _small_cases(name: str) -> Iterator[CompileCase]:
    """The memory-bound kernels, with everything they can do."""
    yield CompileCase(
        "lazy.fold",
        name,
        fold.fold_kernel,
        {
            "weight_ptr": "*fp32:16",
            **{f"{p}_ptr": "*fp32:16" for p in ("gamma", "beta", "bias", "colsum", "offset")},
            "folded_ptr": f"*{name}:16",
            **ints("N", "K"),
            **{"HAS_GAMMA": True, "HAS_BETA": True, "HAS_BIAS": True, "WRITE": True, "ROWS": 4, "BLOCK": 1024},
        },
        {"num_warps": 4},
    )
    yield CompileCase(
        "lazy.stats",
        name,
        stats.stats_kernel,
        {
            "x_ptr": f"*{name}:16",
            **fp32("mean_ptr", "rstd_ptr", "scale_ptr"),
            **ints("M", "K", "stride_x"),
            **{"eps": "fp32", "LAYER": True, "ALIGNED": True, "ROWS": 4, "BLOCK": 1024},
        },
        {"num_warps": 4},
    )
    yield CompileCase(
        "lazy.coefficients",
        name,
        backward.coefficients_kernel,
        {
            "dy_ptr": f"*{name}:16",
            "y_ptr": f"*{name}:16",
            **fp32("colsum_ptr", "offset_ptr", "delta_ptr", "eta_ptr", "partial_ptr"),
            **ints("M", "N", "stride_dy"),
            **{"LAYER": True, "HAS_OFFSET": True, "SUM_ROWS": True, "ALIGNED": True},
            **{"ROWS": COEFFICIENT_COLUMNS // 2048, "BLOCK": 2048},
        },
        {"num_warps": 4},
    )
    row = {"LAYER": True, "ALIGNED": True, "ROWS": 8, "BLOCK": 512}
    yield CompileCase(
        "lazy.hat",
        name,
        wgrad.hat_kernel,
        {
            "x_ptr": f"*{name}:16",
            "hat_ptr": f"*{name}:16",
            **fp32("mean_ptr", "rstd_ptr"),
            **ints("M", "K", "stride_x"),
            **row,
        },
        {"num_warps": 4},
    )
    yield CompileCase(
        "lazy.finish",
        name,
        wgrad.finish_kernel,
        {
            **fp32("partial_ptr", "dy_sum_ptr", "norm_ptr"),
            **{f"{p}_ptr": f"*{name}:16" for p in ("weight", "gamma", "beta", "dweight")},
            **ints("N", "K", "splits"),
            **{"HAS_GAMMA": True, "HAS_BETA": True, "WRITE_WEIGHT": True, "SUM_GAMMA": True, "SUM_BETA": True},
            **{"BN": 32, "BK": 64},
        },
        {"num_warps": 4},
    )


def gemm_cases(kind: Kind, layer: bool, widest: bool = False) -> Iterator[CompileCase]:
    """Every configuration of the kernels that multiply, for one kind of tensors, or of each kernel the widest."""
    for N in (512,) if widest else (128, 512):
        config = forward_config(kind, N)
        yield forward_case(kind, config, layer, even=not config.in_loop)
        if not widest and config.in_loop:
            yield forward_case(kind, config, layer)
            yield forward_case(kind, given_config(kind, N), layer)
    for K in (512,) if widest else (128, 256, 512):
        yield dx_case(kind, dx_config(kind, K, True), layer, True, wgrad_by_blas(kind, K))
    yield dx_case(kind, dx_config(kind, 1024, False), layer, False, wgrad_by_blas(kind, 1024))
    if not wgrad_by_blas(kind, 128):
        yield wgrad_case(kind, wgrad_config(kind), layer)
    limit = NAIVE_MAX_FEATURES[kind.dtype.itemsize]
    for K in (limit,) if widest else sorted({128, limit}):
        yield naive_case(kind, naive_config(kind, K), layer)


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """LayerNorm needs the most registers. The paths for fp32 and for odd rows are the same on every architecture."""
    yield from gemm_cases(Kind(arch, torch.bfloat16, True), True, widest=arch != 90)
    if arch == 90:
        yield from gemm_cases(Kind(arch, torch.bfloat16, False), True, widest=True)
        yield from gemm_cases(Kind(arch, torch.float32, True), True, widest=True)
    yield from _small_cases("bf16")


def race_cases(arch: int) -> Iterator[CompileCase]:
    """Whatever multiplies asynchronously. fp16 lowers like bf16."""
    yield from gemm_cases(Kind(arch, torch.bfloat16, True), False)
    for kind in (
        Kind(arch, torch.bfloat16, True),
        Kind(arch, torch.bfloat16, False),
        Kind(arch, torch.float32, True, tf32=True),
    ):
        yield from gemm_cases(kind, True)
