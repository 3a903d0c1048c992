"""A norm + GEMM kernel that Triton compiles into a race: its x tile feeds an asynchronous product and a row sum."""

import triton
import triton.language as tl

from recsys_norm.kernels.compile import CompileCase


@triton.jit
def racy_kernel(x, w, y, M, N, K, eps, FLATTEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    columns = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * columns, tl.num_programs(0), flatten=FLATTEN):
        row, col = (tile // columns) * BM, (tile % columns) * BN
        acc = tl.zeros((BM, BN), tl.float32)
        squares = tl.zeros((BM,), tl.float32)
        for k in range(0, K, BK):
            a = x.load([row, k])
            b = w.load([col, k])
            acc = tl.dot(a, b.T, acc)
            a = a.to(tl.float32)
            squares += tl.sum(a * a, 1)
        acc = acc * tl.rsqrt(squares / K + eps)[:, None]
        y.store([row, col], acc.to(tl.bfloat16))


def race_cases(arch):
    for BM, BN, BK, stages, warps in ((128, 256, 64, 3, 8), (128, 128, 128, 3, 8), (128, 128, 64, 4, 8)):
        for flatten in (False, True):
            args = {"x": f"tensordesc<bf16[{BM},{BK}]>", "w": f"tensordesc<bf16[{BN},{BK}]>"}
            args |= {"y": f"tensordesc<bf16[{BM},{BN}]>", "M": "i32", "N": "i32", "K": "i32", "eps": "fp32"}
            args |= {"FLATTEN": flatten, "BM": BM, "BN": BN, "BK": BK}
            label = f"{BM} {BN} {BK} {stages} {warps} flatten={flatten}"
            yield CompileCase("racy", label, racy_kernel, args, {"num_stages": stages, "num_warps": warps})
