"""What a source module lists as VARIANTS: its kernels, each with everything that is fixed at compile time.

    VARIANTS = [
        Variant("scale_bf16", scale_kernel, {"x": Tile("bf16", (64, 64)), "y_ptr": "*bf16:16", "M": "i32", "BM": 64},
                maxnreg=168),
    ]

`args` has one entry per parameter of the kernel, in its order: for a constexpr its value, for a tensor map a `Tile`,
else a Triton type name ("*fp32", "i32", "i64", "fp32"), with ":16" appended where every launch guarantees divisibility
by 16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BITS = {"bf16": 16, "fp16": 16, "fp32": 32}


@dataclass(frozen=True)
class Tile:
    """A tensor that a kernel reaches through TMA: element type and the box that one copy moves.

    `layout` is the shared-memory layout where it is not the plain one with 128-byte swizzling, e.g. one that is split
    or multicast over a cluster.
    """

    dtype: str
    box: tuple[int, ...]
    layout: Any = None

    def type_name(self) -> str:
        from triton.experimental.gluon import language as gl

        layout = self.layout or gl.NVMMASharedLayout(
            swizzle_byte_width=128, element_bitwidth=BITS[self.dtype], rank=len(self.box)
        )
        return f"tensordesc<{self.dtype}[{','.join(map(str, self.box))}],{layout!r}>"


@dataclass(frozen=True)
class Variant:
    """One cubin. `num_warps` is that of the default partition; with `num_ctas` > 1 a cluster runs one program."""

    name: str
    kernel: Any = field(compare=False)
    args: dict[str, Any]
    num_warps: int = 4
    num_ctas: int = 1
    maxnreg: int | None = None
