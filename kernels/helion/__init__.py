"""Forwards of norm_linear (lazy pre-norm) and linear_norm (one tile holds the row) in Helion, an optional package."""


def techniques():
    """(op, technique) pairs for `recsys_norm.ops.registry`."""
    from recsys_norm.kernels.helion.technique import LinearNorm, NormLinear

    return [("norm_linear", NormLinear()), ("linear_norm", LinearNorm())]
