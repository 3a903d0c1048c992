"""The ops: norms fused with the linears and the attention around them.

Every op takes

    backend          "unfused": eager PyTorch. "compiled": the same through torch.compile. "naive": one tile spans the
                     whole normalised row. "fused": the best technique for the problem.
    technique        forces one technique of the fused backend by name ("separate", "lazy", ...); None chooses.
    on_unsupported   "raise": one UnsupportedError that names the limit. "fallback": the next technique down serves the
                     call, with one warning per reason and a count (`fallbacks()`).

and computes gradients for all its tensors. `counts()` tells which technique served which op.
"""

from recsys_norm.ops import flops as _flops  # noqa: F401  (registers the formulas)
from recsys_norm.ops.identity import norms_as_identity
from recsys_norm.ops.jagged_attention import jagged_attention
from recsys_norm.ops.linear_norm import linear_norm
from recsys_norm.ops.linear_norm_linear import linear_norm_linear
from recsys_norm.ops.norm import layer_norm, rms_norm
from recsys_norm.ops.norm_attention import norm_attention
from recsys_norm.ops.norm_linear import norm_linear
from recsys_norm.ops.problem import AttentionSpec, Problem, Technique
from recsys_norm.ops.registry import UnsupportedError, counts, fallbacks, reset_counts

__all__ = [
    "AttentionSpec",
    "Problem",
    "Technique",
    "UnsupportedError",
    "counts",
    "fallbacks",
    "jagged_attention",
    "layer_norm",
    "linear_norm",
    "linear_norm_linear",
    "norm_attention",
    "norm_linear",
    "norms_as_identity",
    "reset_counts",
    "rms_norm",
]
