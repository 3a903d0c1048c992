"""The versions of torch, torchrec and fbgemm, and whether they fit together.

fbgemm is a C++ extension bound to one torch minor version, and torchrec imports it. A wrong pair fails far from its
cause (`undefined symbol`, `_OpNamespace has no attribute`), so what needs torchrec calls `require_torchrec()` first.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from types import ModuleType

FBGEMM_FOR_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}
TESTED_TORCH = "2.13"

_FBGEMM_BUILDS = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu")
# What torchrec needs besides fbgemm, down to the leaves: torchrec itself requires the CUDA build of fbgemm, so a CPU
# machine has to install it with --no-deps.
_TORCHREC_NEEDS = (
    "tensordict cloudpickle pyvers tqdm pyre-extensions typing-inspect mypy-extensions lightning-utilities"
)
_TORCHMETRICS = "1.0.3"


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None if it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def fbgemm_builds() -> dict[str, str]:
    """The installed builds of fbgemm as {distribution name: version}."""
    return {name: version for name in _FBGEMM_BUILDS if (version := version_of(name)) is not None}


def minor(version: str) -> str:
    """`2.13.0+cpu` -> `2.13`."""
    return ".".join(version.split("+")[0].split(".")[:2])


def versions_found() -> str:
    """One line that names the installed torch, torchrec, fbgemm and torchmetrics."""
    found = {"torch": version_of("torch"), "torchrec": version_of("torchrec")}
    builds = fbgemm_builds()
    found |= {**builds} if builds else {"fbgemm-gpu": None}
    found["torchmetrics"] = version_of("torchmetrics")
    return ", ".join(f"{name} {version or '(not installed)'}" for name, version in found.items())


def mismatch() -> str | None:
    """What does not fit, judged by the installed versions alone; None if nothing is known to be wrong."""
    torch, torchrec, torchmetrics = (version_of(name) for name in ("torch", "torchrec", "torchmetrics"))
    builds = fbgemm_builds()
    if torch is not None and minor(torch) not in FBGEMM_FOR_TORCH:
        return f"torch {torch} is outside the supported versions {min(FBGEMM_FOR_TORCH)} to {max(FBGEMM_FOR_TORCH)}"
    if torchrec is None:
        return "torchrec is not installed"
    if not builds:
        return "fbgemm is not installed"
    torch_of = {fbgemm: torch_minor for torch_minor, fbgemm in FBGEMM_FOR_TORCH.items()}
    built_for = {name: torch_of.get(minor(version)) for name, version in builds.items()}
    # A nightly or a build from source has a version that is not in the table; the import decides there.
    if torch is not None and not {None, minor(torch)} & set(built_for.values()):
        name, version = next(iter(builds.items()))
        return f"{name} {version} is built for torch {built_for[name]}, and torch is {torch}"
    pin = _torchmetrics_pin()
    if torchmetrics != pin:
        return f"torchrec {torchrec} needs torchmetrics {pin}, found {torchmetrics or 'none'}"
    return None


def mend_command() -> str:
    """The pip command that installs the torchrec and fbgemm that fit the installed torch.

    The tested torch is installed with them only where the installed one is outside the supported range.
    """
    import torch

    build = "fbgemm-gpu-cpu" if torch.version.cuda is None else "fbgemm-gpu"
    torch_minor = minor(torch.__version__)
    supported = torch_minor in FBGEMM_FOR_TORCH
    fbgemm = FBGEMM_FOR_TORCH[torch_minor if supported else TESTED_TORCH]
    torchrec = f"torchrec~={fbgemm}.0"
    pair = f"{build}~={fbgemm}.0 torchmetrics=={_torchmetrics_pin()}"
    if supported:
        return f"pip install --force-reinstall --no-deps {torchrec} {pair} {_TORCHREC_NEEDS}"
    return f"pip install torch~={TESTED_TORCH}.0 {pair} {_TORCHREC_NEEDS} && pip install --no-deps {torchrec}"


@functools.cache
def require_torchrec() -> ModuleType:
    """Import torchrec with its fbgemm operators and return it.

    Raises ImportError naming the versions found and the command that mends them, when torchrec or fbgemm is missing,
    when they do not fit the installed torch or torchmetrics, or when their libraries do not load.
    """
    reason = mismatch()
    if reason is not None:
        raise ImportError(_message(reason))
    try:
        import torch

        importlib.import_module("fbgemm_gpu")
        torchrec = importlib.import_module("torchrec")
        # A library that failed to load is only logged by fbgemm and torchrec; the first use of an operator tells.
        torch.ops.fbgemm.asynchronous_complete_cumsum(torch.ones(1, dtype=torch.int64))
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ImportError(_message(f"{type(error).__name__}: {first_line}")) from error
    return torchrec


def _message(reason: str) -> str:
    # One line, so that a log or a program that shows the first line of an error shows the command too.
    return f"torchrec cannot be used here: {reason}. Found {versions_found()}. To mend it, run: {mend_command()}"


def _torchmetrics_pin() -> str:
    """The torchmetrics version the installed torchrec asks for."""
    try:
        requirements = importlib.metadata.requires("torchrec") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    pins = (re.match(r"torchmetrics\s*==\s*([\w.]+)", requirement) for requirement in requirements)
    return next((pin[1] for pin in pins if pin), _TORCHMETRICS)
