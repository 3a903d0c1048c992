"""linear_norm_linear in Triton: techniques `deferred` (the norm as a row scale of the second GEMM) and `naive`."""


def techniques():
    """(op, technique) pairs for `recsys_norm.ops.registry`."""
    from recsys_norm.kernels.deferred.technique import Deferred, Naive

    return [("linear_norm_linear", Deferred()), ("linear_norm_linear", Naive())]
