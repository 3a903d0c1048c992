"""norm_attention with its norms inside the attention kernels (FlashNormAttention), in plain Triton for every GPU."""


def techniques():
    """(op, technique) pairs for `recsys_norm.ops.registry`."""
    from recsys_norm.kernels.flashnorm.technique import FlashNorm

    return [("norm_attention", FlashNorm())]
