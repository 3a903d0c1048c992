"""Technique `separate` on CUDA: the project's own LayerNorm and RMSNorm kernels, and cuBLAS."""


def techniques():
    """(op, technique) pairs for `recsys_norm.ops.registry`."""
    from recsys_norm.kernels.norm.technique import OPS, Separate

    return [(op, Separate()) for op in OPS]
