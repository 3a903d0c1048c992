"""linear_norm with the row of the result spread over a cluster of blocks: GEMM, norm and residual in one kernel.

Every block of a cluster holds the same rows and its own columns of z; the blocks exchange two numbers per row through
distributed shared memory, twice for LayerNorm. Needs Hopper or newer. Triton 3.8 and newer reduce across a cluster
themselves; before, the exchange is written in PTX.
"""

from __future__ import annotations

import functools
import re

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_norm.kernels.activations import IDENTITY
from recsys_norm.kernels.lazy.common import (
    INTERPRETED,
    descriptor,
    dot_precision,
    fits_descriptor,
    load_tile,
    matmul,
)
from recsys_norm.kernels.postnorm.configs import ClusterConfig
from recsys_norm.kernels.postnorm.naive import AFTER, BEFORE, RESIDUAL, TYPES, post_norm, pre_norm

# Triton reduces across a cluster itself (so does the interpreter, which has none).
NATIVE: tl.constexpr = tl.constexpr(
    bool(INTERPRETED.value) or tuple(int(v) for v in triton.__version__.split(".")[:2]) >= (3, 8)
)
CONSTRAINTS: tl.constexpr = tl.constexpr("=f,=f,f,f")


def exchange_assembly(blocks: int, threads: int) -> str:
    """PTX that replaces ($2, $3) of a thread by their sums over the same thread of every block of the cluster.

    Each thread writes its pair to its own shared memory, reads the pair of every block after a cluster barrier, and
    waits for a second one, so that no block overwrites or leaves what another may still read.
    """
    reads = "\n".join(
        f"mapa.shared::cluster.u32 peer, own, {block}; ld.shared::cluster.v2.f32 {{a, b}}, [peer];"
        " add.f32 sum_a, sum_a, a; add.f32 sum_b, sum_b, b;"
        for block in range(blocks)
    )
    barrier = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    return f"""{{
        .shared .align 8 .b8 exchanged[{8 * threads}];
        .reg .u32 thread, own, peer;
        .reg .f32 a, b, sum_a, sum_b;
        mov.u32 thread, %tid.x; mov.u32 own, exchanged; mad.lo.u32 own, thread, 8, own;
        st.shared.v2.f32 [own], {{$2, $3}};
        {barrier}
        mov.f32 sum_a, 0f00000000; mov.f32 sum_b, 0f00000000;
        {reads}
        {barrier}
        mov.f32 $0, sum_a; mov.f32 $1, sum_b;
    }}"""


@triton.jit
def over_cluster(a, b, ASSEMBLY: tl.constexpr):
    """[BM, BLOCKS] values to their sums over BLOCKS, which is spread over the cluster, in the same shape."""
    if NATIVE:
        a = tl.broadcast_to(tl.sum(a, 1)[:, None], a.shape)
        b = tl.broadcast_to(tl.sum(b, 1)[:, None], b.shape)
    else:
        a, b = tl.inline_asm_elementwise(
            ASSEMBLY, CONSTRAINTS, [a, b], dtype=(tl.float32, tl.float32), is_pure=False, pack=1
        )
    return a, b


@triton.jit
def rows_of(value, BM: tl.constexpr, BN: tl.constexpr, BLOCKS: tl.constexpr):
    """[BM, BLOCKS] row values as a [BM, BN] tile in the layout of the accumulators."""
    return tl.broadcast_to(value[:, :, None], (BM, BLOCKS, BN // BLOCKS)).reshape((BM, BN))


@triton.jit
def store_rows(ptr, value, rows, M, BLOCKS: tl.constexpr):
    """Store [BM, BLOCKS] row values, which every block of the cluster holds, from the first block. Before Triton 3.8 an
    ordinary store would want its operands in another block's registers."""
    block = tl.arange(0, BLOCKS)[None, :]
    address = ptr + rows[:, None] + block * 0
    keep = (rows < M)[:, None] & (block == 0)
    if NATIVE:
        tl.store(address, value, mask=keep)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,f,r",
            [address.to(tl.int64), value, keep.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["M", "N", "K", "stride_x", "stride_residual", "eps"])
def cluster_kernel(
    x,  # tile source of [M, K]
    weight,  # tile source of [N, K]
    bias_ptr,  # [N]
    gamma_ptr,  # [N]
    beta_ptr,  # [N]
    residual,  # tile source of [M, N]
    y,  # tile target of [M, N], as the next two
    z,  # written with WRITE_Z
    hat,  # zhat, written with WRITE_HAT
    mean_ptr,  # [M] fp32, relative to the row's first element
    rstd_ptr,  # [M] fp32
    M,
    N,
    K,
    stride_x,
    stride_residual,
    eps,
    LAYER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WRITE_Z: tl.constexpr,
    WRITE_HAT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of a cluster, each with BN / BLOCKS columns
    BM: tl.constexpr,
    BN: tl.constexpr,  # >= N
    BK: tl.constexpr,
):
    row = tl.program_id(0) * BM
    rows = row + tl.arange(0, BM)
    inside = (tl.arange(0, BN) < N)[None, :]
    width = N.to(tl.float32)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = load_tile(x, row, k, M, K, stride_x, True, BM, BK)
        b = load_tile(weight, 0, k, N, K, K, True, BN, BK)
        acc = matmul(a, b.T, acc, PRECISION)
    acc = pre_norm(
        acc, bias_ptr, residual, z, row, 0, M, N, stride_residual,
        HAS_BIAS, RESIDUAL == BEFORE, WRITE_Z, TYPE, True, BM, BN,
    )  # fmt: skip
    SHAPE: tl.constexpr = (BM, BLOCKS, BN // BLOCKS)
    if LAYER:
        head = tl.where((tl.arange(0, BN) == 0)[None, :], acc, 0.0)
        first, total = over_cluster(tl.sum(head.reshape(SHAPE), 2), tl.sum(acc.reshape(SHAPE), 2), ASSEMBLY)
        mean = total / width
        d = tl.where(inside, acc - rows_of(mean, BM, BN, BLOCKS), 0.0)
        # What the rounded mean misses comes from the exact differences, and is taken off again.
        missed, square = over_cluster(tl.sum(d.reshape(SHAPE), 2), tl.sum((d * d).reshape(SHAPE), 2), ASSEMBLY)
        rest = missed / width
        rstd = tl.rsqrt(tl.maximum(square / width - rest * rest, 0.0) + eps)
        d = tl.where(inside, d - rows_of(rest, BM, BN, BLOCKS), 0.0)
        store_rows(mean_ptr, (mean - first) + rest, rows, M, BLOCKS)
    else:
        d = acc
        square = tl.sum((d * d).reshape(SHAPE), 2)
        square, _ = over_cluster(square, square, ASSEMBLY)
        rstd = tl.rsqrt(square / width + eps)
    store_rows(rstd_ptr, rstd, rows, M, BLOCKS)
    d = d * rows_of(rstd, BM, BN, BLOCKS)
    post_norm(
        d, tl.full((BM,), 1.0, tl.float32), gamma_ptr, beta_ptr, residual, y, hat, row, 0, M, N, stride_residual,
        HAS_GAMMA, HAS_BETA, IDENTITY, False, RESIDUAL == AFTER, WRITE_HAT, TYPE, True, BM, BN,
    )  # fmt: skip


@functools.cache
def _assembly(blocks: int, threads: int) -> tl.constexpr:
    return tl.constexpr(exchange_assembly(blocks, threads))


def splits_columns_only(ttgir: str, blocks: int) -> bool:
    """Whether the blocks of the cluster divide the accumulators by columns and nothing else, which the exchange in PTX
    takes for granted (a thread must hold the same rows in every block)."""
    wanted = ", ".join(f"[0, {1 << i}, 0]" for i in range(blocks.bit_length() - 1))
    found = re.findall(r"#ttg\.linear<.*block = \[((?:\[\d+, \d+, \d+\](?:, )?)+)\]", ttgir)
    return bool(found) and all(bases == wanted for bases in found)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    *,
    layer: bool,
    eps: float,
    config: ClusterConfig,
    position: str | None,
    write_z: bool,
    write_hat: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """(y, z, zhat, mean, rstd); z and zhat are None unless asked for. config.BN must span the row; the rows of every
    matrix must be multiples of 16 bytes."""
    M, K = x.shape
    N = weight.shape[0]
    x, weight = (t if fits_descriptor(t) else t.clone() for t in (x, weight.to(x.dtype)))
    if residual is not None and not fits_descriptor(residual):
        residual = residual.clone()
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    z = torch.empty_like(y) if write_z else None
    hat = torch.empty_like(y) if write_hat else None
    mean = torch.empty(M, device=x.device, dtype=torch.float32) if layer else None
    rstd = torch.empty(M, device=x.device, dtype=torch.float32)

    def tile(t: Tensor | None, rows: int, cols: int):
        return None if t is None else descriptor(t, rows, cols)

    compiled = cluster_kernel[(triton.cdiv(M, config.BM),)](
        tile(x, config.BM, config.BK),
        tile(weight, config.BN, config.BK),
        bias,
        gamma,
        beta,
        tile(residual, config.BM, config.BN),
        tile(y, config.BM, config.BN),
        tile(z, config.BM, config.BN),
        tile(hat, config.BM, config.BN),
        mean,
        rstd,
        M,
        N,
        K,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        LAYER=layer,
        HAS_BIAS=bias is not None,
        HAS_GAMMA=gamma is not None,
        HAS_BETA=beta is not None,
        RESIDUAL=0 if residual is None else RESIDUAL[position],
        WRITE_Z=write_z,
        WRITE_HAT=write_hat,
        ASSEMBLY=_assembly(config.blocks, 32 * config.num_warps),
        TYPE=TYPES[x.dtype],
        PRECISION=dot_precision(x.dtype),
        BLOCKS=config.blocks,
        BM=config.BM,
        BN=config.BN,
        BK=config.BK,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_ctas=1 if INTERPRETED else config.blocks,
    )
    if not NATIVE:
        _check_once(compiled, config.blocks)
    return y, z, hat, mean, rstd


_checked: set[str] = set()


def _check_once(compiled, blocks: int) -> None:
    if compiled.hash not in _checked:
        if not splits_columns_only(compiled.asm["ttgir"], blocks):
            raise RuntimeError(
                f"Triton {triton.__version__} does not divide this kernel's accumulators by columns over a cluster of "
                f"{blocks}; use technique='naive' or 'separate'"
            )
        _checked.add(compiled.hash)
