"""linear_norm in Triton: `naive` (a tile per row), `cluster` (a cluster per row), `two_kernel` (statistics first)."""


def techniques():
    """(op, technique) pairs for `recsys_norm.ops.registry`."""
    from recsys_norm.kernels.postnorm.technique import Cluster, Naive, TwoKernel

    return [("linear_norm", Naive()), ("linear_norm", Cluster()), ("linear_norm", TwoKernel())]
