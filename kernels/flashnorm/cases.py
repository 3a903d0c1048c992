"""Compile cases of the FlashNormAttention kernels: what recsys_norm.kernels.compile checks per architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recsys_norm.kernels.compile import CompileCase
from recsys_norm.kernels.flashnorm import backward_k, backward_q, configs, forward, stats
from recsys_norm.kernels.gdpa.configs import Config

_VEC = {"bf16": 8, "fp16": 8, "fp32": 4}
_FP32 = ("mean_ptr", "rstd_ptr", "part_ptr", "columns_ptr", "weight_ptr", "bias_ptr")
# The PFFN: layer norm of q, gelu_tanh, both residuals, rms norm of the output, all affine.
_PFFN = {
    "ACT": 5, "PRE": 1, "PRE_MEAN": True, "PRE_WEIGHT": True, "PRE_BIAS": True, "INNER": True, "POST": 1,
    "POST_WEIGHT": True, "POST_BIAS": False, "RESIDUAL": True, "WRITE_HAT": True, "EXTRA": False, "SUM_WEIGHT": True,
    "SUM_BIAS": True,
}  # fmt: skip


def attention_case(
    kernel: Any,
    config: Config,
    *,
    d: int,
    resident: bool = True,
    dtype: str = "bf16",
    heads: int = 4,
    masked: bool = False,
    **options: Any,
) -> CompileCase:
    """One kernel for the PFFN at head width d, or with other options, as the launch would compile it."""
    width = configs.padded_width(d)
    constants = _PFFN | {
        "MASKED": masked,
        "RESIDENT": resident,
        "HEADS": configs.padded_heads(heads),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": width,
        "VEC": _VEC[dtype],
        "EVEN": width == d,
        "SHIFT": dtype == "fp32",
        "FAST": dtype == "bf16",
        "UPCAST": False,
        "PRECISION": "ieee",
    }
    constants |= options
    args: dict[str, Any] = {}
    for parameter in kernel.params:
        name = parameter.name
        if parameter.is_constexpr:
            args[name] = constants[name]
        elif name.endswith(("offsets_ptr", "count_ptr")):
            args[name] = "*i32:16"
        elif name.endswith(_FP32):
            args[name] = "*fp32:16"
        elif name.endswith("_ptr"):
            args[name] = f"*{dtype}:16"
        else:
            args[name] = "fp32" if name in ("scale", "eps") else "i32"
    words = [f"d{d}", dtype, "resident" if resident else "streamed", f"{config.block_m}x{config.block_n}"]
    words += ["masked"] * masked + [f"{k}={v}" for k, v in options.items()]
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return CompileCase(f"flashnorm.{kernel.__name__}", " ".join(words), kernel, args, launch)


def statistics_case(heads: int, d: int) -> CompileCase:
    args = {
        "q_ptr": "*bf16:16", "offsets_ptr": "*i32:16", "mean_ptr": "*fp32:16", "centre_ptr": "*fp32:16",
        "rstd_ptr": "*fp32:16", "batch": "i32", "queries": "i32", "heads": "i32", "width": "i32", "token": "i32",
        "head": "i32", "eps": "fp32", "HAS_MEAN": True, "SHIFT": False, "ROWS": configs.statistics_rows(heads, d),
        "HEADS": configs.padded_heads(heads), "BLOCK_D": configs.padded_width(d), "VEC": 8,
    }  # fmt: skip
    return CompileCase("flashnorm.row_statistics", f"{heads} x {d}", stats.row_statistics, args, {"num_warps": 4})


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """The PFFN of 4 heads of 128 with its keys on chip, and for Hopper the form that streams keys, windowed."""
    resident = configs.resident_block(arch, 128, 2, 128)
    yield attention_case(forward.forward, configs.forward(arch, 128, 2, resident), d=128)
    yield attention_case(backward_q.backward_q, configs.backward_q(arch, 128, 2, resident), d=128)
    yield attention_case(backward_k.backward_k, configs.backward_k(arch, 128, 2, 128), d=128)
    yield statistics_case(4, 128)
    if arch == 90:
        streamed = dict(d=128, resident=False, masked=True)
        yield attention_case(forward.forward, configs.forward(arch, 128, 2, None), **streamed)
        yield attention_case(backward_q.backward_q, configs.backward_q(arch, 128, 2, None), **streamed, PRE=2)
