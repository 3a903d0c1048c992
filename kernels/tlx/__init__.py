"""linear_norm over clusters of blocks in TLX, which is part of the Triton fork `fbtriton`."""


def techniques():
    """(op, technique) pairs for `recsys_norm.ops.registry`."""
    from recsys_norm.kernels.tlx.technique import LinearNorm

    return [("linear_norm", LinearNorm())]
