"""Fused normalization for ranking models.

`recsys_norm.ops` holds the functions, `recsys_norm.nn` the modules, `recsys_norm.models` a Kunlun-style ranking model
and `recsys_norm.training` the training program. A subpackage is imported when it is first named: importing this
package alone loads neither torch, triton, torchrec nor fbgemm, and never touches CUDA.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recsys_norm.conversion import convert as convert
    from recsys_norm.conversion import revert as revert

__version__ = "0.1.0.dev0"

_SUBMODULES = frozenset(
    (
        "bench",
        "configs",
        "conversion",
        "data",
        "env",
        "kernels",
        "models",
        "nn",
        "ops",
        "reference",
        "testing",
        "training",
    )
)


def __getattr__(name):
    if name in ("convert", "revert"):
        return getattr(importlib.import_module(f"{__name__}.conversion"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(_SUBMODULES | globals().keys())
