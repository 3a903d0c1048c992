"""norm_linear as one GEMM: techniques `lazy` (the norm is a row scale of the result) and `naive` (one tile per row)."""


def techniques():
    """(op, technique) pairs for `recsys_norm.ops.registry`."""
    from recsys_norm.kernels.lazy.technique import Lazy, Naive

    return [("norm_linear", Lazy()), ("norm_linear", Naive())]
