"""Compile cases of the softmax kernels: what recsys_norm.kernels.compile checks for every declared architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recsys_norm.kernels.compile import CompileCase
from recsys_norm.kernels.gdpa.configs import Config, padded_width
from recsys_norm.kernels.hopper.softmax_backward import ZEROS
from recsys_norm.kernels.softmax import backward, configs, forward, forward_blocks, queries

_TYPES = {f"{x}_ptr": "*i32:16" for x in ("q_offsets", "k_offsets", "offsets", "order")}
_TYPES |= {f"{x}_ptr": "*fp32:16" for x in ("lse", "stats", "zeros")} | {"scale": "fp32"}


def _case(kernel: Any, config: Config, d: int, dtype: str, **constants: Any) -> CompileCase:
    """One kernel at head width d, as the launch would compile it for aligned tensors."""
    width = padded_width(d)
    args: dict[str, Any] = {
        p.name: _TYPES.get(p.name, f"*{dtype}:16" if p.name.endswith("_ptr") else "i32")
        for p in kernel.params
        if not p.is_constexpr
    }
    args |= {"BLOCK_M": config.block_m, "BLOCK_D": width}
    args |= {"VEC": 8, "EVEN": width == d, "UPCAST": False, "BLOCK_N": config.block_n} | constants
    args |= {f"{x}_blocks": f"tensordesc<{dtype}[{config.block_n}, {width}]>" for x in "kv"}
    args = {p.name: args[p.name] for p in kernel.params}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    label = f"d{d} {dtype}{' masked' if constants.get('MASKED') else ''} {config.block_m}x{config.block_n}"
    return CompileCase(f"softmax.{kernel.__name__}", label, kernel, args, options)


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """d = 128 with and without a mask, the widest head of the forward, the backward for few queries, and what the one on
    Hopper wants to know."""
    for d, dtype, masked in ((128, "bf16", True), (128, "bf16", False), (256, "fp16", True)):
        yield _case(forward.forward, configs.tile(arch, d), d, dtype, MASKED=masked)
    yield _case(backward.few_queries, configs.few_queries_tile(), 128, "bf16")
    if arch != 90:
        return
    for masked in (True, False):
        yield _case(forward_blocks.forward_blocks, configs.tile(arch, 128), 128, "bf16", MASKED=masked)
    more = {"ZEROS": ZEROS, "RANKED": queries.RANKED}
    yield _case(queries.describe_queries, configs.queries_tile(), 128, "bf16", **more)
    yield _case(queries.first_queries, configs.first_queries_tile(), 128, "bf16")
