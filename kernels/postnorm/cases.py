"""What the postnorm package ships, for the compile and race checks: every configuration with everything it can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl

from recsys_norm.kernels.activations import IDENTITY
from recsys_norm.kernels.compile import CompileCase
from recsys_norm.kernels.lazy.cases import NAMES, fp32, ints, label, options, source
from recsys_norm.kernels.lazy.configs import GemmConfig, Kind
from recsys_norm.kernels.postnorm import cluster, naive, partial
from recsys_norm.kernels.postnorm.configs import cluster_config, gemm_config, naive_config


def _common(kind: Kind, config: GemmConfig) -> dict[str, Any]:
    name, tma = NAMES[kind.dtype], config.tma and kind.aligned
    part = config.BN // 2 if config.split_store else config.BN
    return {
        "x": source(name, tma, kind.aligned, config.BM, config.BK),
        "weight": source(name, tma, kind.aligned, config.BN, config.BK),
        "residual": source(name, tma, kind.aligned, config.BM, part),
        **{f"{p}_ptr": f"*{name}:16" for p in ("bias", "gamma", "beta")},
        **ints("M", "N", "K", "stride_x", "stride_residual"),
        "HAS_BIAS": True,
        "ALIGNED": kind.aligned,
        "TMA": tma,
        "WAIT": config.wait,
        "FLATTEN": config.flatten,
        "SPLIT": config.split_store,
        "TYPE": naive.TYPES[kind.dtype],
        "PRECISION": "tf32" if kind.tf32 else "ieee",
        "BM": config.BM,
        "BN": config.BN,
        "BK": config.BK,
    }


def naive_case(kind: Kind, config: GemmConfig, layer: bool) -> CompileCase:
    """With a residual after the norm and zhat stored, which together need the most registers."""
    args = _common(kind, config)
    args |= {name: args["residual"] for name in ("y", "z", "hat")}
    args |= {**fp32("mean_ptr", "rstd_ptr"), "eps": "fp32", "LAYER": layer, "HAS_GAMMA": True, "HAS_BETA": layer}
    args |= {"RESIDUAL": 2, "WRITE_Z": False, "WRITE_HAT": True, "ACTIVATION": IDENTITY.value, "FAST": True}
    text = label(kind, "layer" if layer else "rms", config.BM, config.BN, config.BK)
    return CompileCase("postnorm.naive", text, naive.naive_kernel, args, options(config))


def gemm_case(kind: Kind, config: GemmConfig, layer: bool) -> CompileCase:
    args = _common(kind, config)
    del args["gamma_ptr"], args["beta_ptr"]
    args |= {"z": args["residual"], "LAYER": layer, "ADD": True, **fp32("first_ptr", "mean_ptr", "square_ptr")}
    text = label(kind, "layer" if layer else "rms", config.BM, config.BN, config.BK)
    return CompileCase("postnorm.gemm", text, partial.gemm_kernel, args, options(config))


def cluster_case(kind: Kind, N: int, layer: bool) -> CompileCase:
    config = cluster_config(kind, N)
    args = _common(kind, GemmConfig(config.BM, config.BN, config.BK, config.num_stages, config.num_warps, tma=True))
    for name in ("WAIT", "FLATTEN", "SPLIT", "ALIGNED", "TMA"):
        del args[name]
    args |= {name: args["residual"] for name in ("y", "z", "hat")}
    args |= {**fp32("mean_ptr", "rstd_ptr"), "eps": "fp32", "LAYER": layer, "HAS_GAMMA": True, "HAS_BETA": layer}
    args |= {"RESIDUAL": 0, "WRITE_Z": False, "WRITE_HAT": True, "BLOCKS": config.blocks}
    args["ASSEMBLY"] = cluster.exchange_assembly(config.blocks, 32 * config.num_warps)
    text = label(kind, "layer" if layer else "rms", config.blocks, config.BM, config.BN, config.BK)
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages, "num_ctas": config.blocks}
    return CompileCase("postnorm.cluster", text, cluster.cluster_kernel, args, launch)


def _small_cases() -> Iterator[CompileCase]:
    yield CompileCase(
        "postnorm.merge",
        "fp32",
        partial.merge_kernel,
        {
            **fp32("first_ptr", "mean_ptr", "square_ptr", "row_mean_ptr", "rstd_ptr", "scale_ptr"),
            **ints("M", "N", "tile_width"),
            **{"eps": "fp32", "LAYER": True, "BLOCK": 512},
        },
        {"num_warps": 4},
    )
    rows = {"z_ptr": "*bf16:16", **{name: "*bf16:16" for name in ("residual", "y", "hat", "gamma_ptr", "beta_ptr")}}
    yield CompileCase(
        "postnorm.apply",
        "bf16",
        partial.apply_kernel,
        {
            **rows,
            **fp32("first_ptr", "mean_ptr", "rstd_ptr"),
            **ints("M", "N", "stride_residual"),
            **{"LAYER": True, "HAS_GAMMA": True, "HAS_BETA": True, "ADD": True, "WRITE_HAT": True, "ALIGNED": True},
            **{"TYPE": tl.bfloat16, "ROWS": 8, "BLOCK": 512},
        },
        {"num_warps": 4},
    )


def gemm_cases(kind: Kind, layer: bool, widest: bool = False) -> Iterator[CompileCase]:
    """Every configuration of the kernels that multiply, for one kind of tensors, or of each kernel the widest."""
    for N in (512,) if widest else (128, 256, 512):
        yield naive_case(kind, naive_config(kind, N), layer)
    for N in (512,) if widest else (128, 512):
        yield gemm_case(kind, gemm_config(kind, N), layer)


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """LayerNorm needs the most registers. The paths for fp32 and for odd rows are the same on every architecture."""
    yield from gemm_cases(Kind(arch, torch.bfloat16, True), True, widest=arch != 90)
    if arch == 90:
        yield from gemm_cases(Kind(arch, torch.bfloat16, False), True, widest=True)
        yield from gemm_cases(Kind(arch, torch.float32, True), True, widest=True)
    if arch >= 90:
        for N in (256, 512, 1024) if arch == 90 else (1024,):
            yield cluster_case(Kind(arch, torch.bfloat16, True), N, True)
    yield from _small_cases()


def race_cases(arch: int) -> Iterator[CompileCase]:
    """Whatever multiplies asynchronously."""
    for kind in (Kind(arch, torch.bfloat16, True), Kind(arch, torch.float32, True, tf32=True)):
        yield from gemm_cases(kind, True)
    yield cluster_case(Kind(arch, torch.bfloat16, True), 512, True)
