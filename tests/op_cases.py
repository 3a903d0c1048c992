"""Arguments for the GEMM ops, shared by their tests."""

import torch

from recsys_norm.testing import relative_error

GEMM_OPS = ["norm", "norm_linear", "linear_norm", "linear_norm_linear"]
FORCED = {"backend": "fused", "technique": "separate"}  # runs on any device
# M, K, N of norm_linear for which, with 132 multiprocessors, programs of Hopper's weight gradient share a last split of the
# rows: of one or several tiles each, odd and even numbers of slots, one part of a tile's columns or two.
SHARED_SPLITS = [(30000, 512, 512), (65536, 512, 1024), (40000, 512, 1536), (40000, 1024, 1024), (70000, 384, 640),
                 (50000, 760, 1128)]  # fmt: skip


def tensors_for(op, M=17, K=24, N=20, N2=12, *, dtype=torch.float32, param_dtype=None, norm="layer", affine=True,
                bias=True, residual=False, mean=0.0, scale=1.0, seed=0):  # fmt: skip
    """Arguments of one op by name, all with requires_grad."""
    g = torch.Generator().manual_seed(seed)
    param_dtype = param_dtype or dtype

    def randn(*shape, dtype=param_dtype, scale=1.0, mean=0.0):
        return (torch.randn(shape, generator=g) * scale + mean).to(dtype).requires_grad_()

    x = randn(M, K, dtype=dtype, scale=scale, mean=mean)
    if op == "norm":
        t = {"x": x, "weight": randn(K, mean=1.0) if affine else None}
        if norm == "layer":
            t["bias"] = randn(K) if affine else None
        return t | ({"residual": randn(M, K, dtype=dtype)} if residual else {})
    width = K if op == "norm_linear" else N
    gamma = {"norm_weight": randn(width, mean=1.0) if affine else None}
    gamma["norm_bias"] = randn(width) if affine and norm == "layer" else None
    first, second = randn(N, K, scale=K**-0.5), randn(N) if bias else None
    if op == "linear_norm_linear":
        last, last_bias = randn(N2, N, scale=N**-0.5), randn(N2) if bias else None
        return {"x": x, "weight1": first, "bias1": second, "weight2": last, "bias2": last_bias, **gamma}
    t = {"x": x, "weight": first, "bias": second, **gamma}
    return t | ({"residual": randn(M, N, dtype=dtype)} if residual else {})


def check_added_gradient(technique, tensors, norm, limit):
    """norm_linear's dx with a gradient from a residual stream in it is the sum of both, within `limit` of the sum in fp64;
    no other gradient changes."""
    arguments = [tensors[n] for n in ("x", "weight", "bias", "norm_weight", "norm_bias")]
    arguments = [None if t is None else t.detach() for t in arguments]
    policy = ("fused", technique, "raise")
    y, mean, rstd = torch.ops.recsys_norm.norm_linear(*arguments, norm, 1e-5, True, *policy)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    x = arguments[0]
    wide = torch.randn(x.shape[0], x.shape[1] + 8, generator=torch.Generator().manual_seed(2)).to(x)
    saved = (mean, rstd, y if x.shape[1] > 512 else None)
    for add in (wide[:, 8:], wide[:, 8:].contiguous()):
        for needs in ([True] * 5, [True] + [False] * 4):
            needs = [need and t is not None for need, t in zip(needs, arguments)]
            options = (dy, *arguments, *saved, norm, 1e-5, needs, *policy)
            alone = torch.ops.recsys_norm.norm_linear_backward(*options)
            dx, *rest = torch.ops.recsys_norm.norm_linear_backward(*options, add)
            assert relative_error(dx, alone[0].double() + add.double()) <= limit
            assert all(torch.equal(a, b) for a, b in zip(rest, alone[1:]))
