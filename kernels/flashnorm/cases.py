"""Compile cases of the FlashNormAttention kernels: what recsys_norm.kernels.compile checks per architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recsys_norm.kernels.compile import CompileCase
from recsys_norm.kernels.flashnorm import backward, configs, forward, stats
from recsys_norm.kernels.gdpa.configs import Config

_VEC = {"bf16": 8, "fp16": 8, "fp32": 4}
_FP32 = ("mean_ptr", "rstd_ptr", "rows_ptr", "weight_ptr", "bias_ptr")
# The PFFN: layer norm of q, gelu_tanh, inner residual, affine.
_PFFN = {
    "ACT": 5, "PRE": 1, "PRE_MEAN": True, "PRE_WEIGHT": True, "PRE_BIAS": True, "INNER": True, "POST": 0,
    "POST_WEIGHT": False, "POST_BIAS": False, "RESIDUAL": False, "WRITE_HAT": False,
}  # fmt: skip


def attention_case(
    kernel: Any,
    config: Config,
    *,
    d: int,
    resident: bool = True,
    dtype: str = "bf16",
    masked: bool = False,
    **options: Any,
) -> CompileCase:
    """One kernel for the PFFN at head width d, or with other options, as the launch would compile it."""
    width = configs.padded_width(d)
    constants = _PFFN | {
        "MASKED": masked,
        "RESIDENT": resident,
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
        elif name.endswith("offsets_ptr"):
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
    """The PFFN with heads of 128 and its keys on chip (for the one-pass backward: the widest head for which the
    architecture uses it), keys streamed for a window, and for Hopper softmax and one head with its post-norm."""
    widths = [d for d in (64, 128) if configs.resident_block("backward", arch, d, 2, 128)]
    streamed = dict(d=128, resident=False, masked=True)
    yield attention_case(forward.forward, configs.forward(arch, 128, 2, 128), d=128)
    for width in widths[-1:]:
        yield attention_case(backward.backward_resident, configs.backward_resident(arch, width, 128), d=width)
    yield attention_case(backward.backward_q, configs.backward_q(arch, 128, 2), **streamed)
    yield attention_case(backward.backward_k, configs.backward_k(arch, 128, 2), **streamed)
    yield statistics_case(4, 128)
    if arch == 90:
        one = dict(POST=1, POST_WEIGHT=True, RESIDUAL=True, WRITE_HAT=True)
        yield attention_case(forward.forward, configs.forward(arch, 128, 2, 128), d=128, **one)
        yield attention_case(forward.forward, configs.forward(arch, 128, 2, None), **streamed, ACT=-1)
        yield attention_case(backward.backward_q, configs.backward_q(arch, 128, 2), **streamed, ACT=-1)
        yield attention_case(backward.backward_k, configs.backward_k(arch, 128, 2), **streamed, ACT=-1)
