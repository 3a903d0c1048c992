"""Compile cases of the attention kernels: what recsys_norm.kernels.compile checks for every declared architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recsys_norm.kernels.activations import GELU
from recsys_norm.kernels.compile import CompileCase
from recsys_norm.kernels.gdpa import backward, configs, forward, slack

_VEC = {"bf16": 8, "fp16": 8, "fp32": 4}


def attention_case(
    kernel: Any,
    config: configs.Config,
    *,
    d: int,
    act: int = 5,
    dtype: str = "bf16",
    masked: bool = False,
) -> CompileCase:
    """One kernel at head width d, as the launch would compile it for aligned tensors."""
    args: dict[str, Any] = {}
    for parameter in kernel.params:
        if parameter.name.endswith("offsets_ptr"):
            args[parameter.name] = "*i32:16"
        elif parameter.name.endswith("_ptr"):
            args[parameter.name] = f"*{dtype}:16"
        elif not parameter.is_constexpr:
            args[parameter.name] = "fp32" if parameter.name == "scale" else "i32"
    width = configs.padded_width(d)
    args |= {
        "ACT": act,
        "MASKED": masked,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": width,
        "VEC": _VEC[dtype],
        "EVEN": width == d,
        "FAST": dtype == "bf16",
        "UPCAST": False,
        "PRECISION": "ieee",
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    label = f"d{d} {dtype} act{act}{' masked' if masked else ''} {config.block_m}x{config.block_n}"
    return CompileCase(f"gdpa.{kernel.__name__}", label, kernel, args, options)


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Every kernel at d = 128 (for the one-pass backward: at the widest head for which the architecture uses it), and for
    Hopper the cases that press hardest on registers."""
    gelu = GELU.value
    width = max(d for d in (32, 64, 128) if configs.resident_block("backward", arch, d, 2, 128))
    yield attention_case(forward.forward_resident, configs.forward_resident(arch, 128, 128), d=128)
    yield attention_case(forward.forward_streamed, configs.forward_streamed(arch, 128, 2), d=128, act=gelu, masked=True)
    yield attention_case(backward.backward_resident, configs.backward_resident(arch, width, 128), d=width)
    yield attention_case(backward.backward_dq, configs.backward_dq(arch, 128, 2), d=128, masked=True)
    yield attention_case(backward.backward_dkdv, configs.backward_dkdv(arch, 128, 2), d=128, masked=True)
    args = {"x_ptr": "*bf16:16", "offsets_ptr": "*i32:16", "last": "i32", "rows": "i32", "width": "i32", "BLOCK": 4096}
    yield CompileCase("gdpa.zero_slack", "bf16", slack.zero_slack, args, {"num_warps": 4})
    if arch == 90:
        yield attention_case(forward.forward_resident, configs.forward_resident(arch, 96, 64), d=96, act=gelu)
        yield attention_case(forward.forward_streamed, configs.forward_streamed(arch, 256, 2), d=256, masked=True)
        yield attention_case(backward.backward_resident, configs.backward_resident(arch, 128, 128), d=128, act=gelu)
        yield attention_case(backward.backward_dq, configs.backward_dq(arch, 256, 4), d=256, dtype="fp32")
