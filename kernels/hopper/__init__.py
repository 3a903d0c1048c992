"""Warp-specialised kernels for H100 and H200: provider `hopper` of the ops' techniques.

The kernels are Gluon sources (triton 3.9 names), compiled ahead of time by `build.py` into one archive and run by
`launch.py` through the CUDA driver. So they work under every supported torch, whatever Triton came with it.
"""


def techniques():
    """(op, technique) pairs for `recsys_norm.ops.registry`."""
    from recsys_norm.kernels.hopper.attention import FlashNorm
    from recsys_norm.kernels.hopper.deferred import Deferred
    from recsys_norm.kernels.hopper.lazy import Lazy
    from recsys_norm.kernels.hopper.postnorm import Cluster

    return [
        ("norm_linear", Lazy()),
        ("linear_norm", Cluster()),
        ("linear_norm_linear", Deferred()),
        ("norm_attention", FlashNorm()),
    ]
