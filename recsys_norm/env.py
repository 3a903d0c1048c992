"""What this machine has and what can run on it: `python -m recsys_norm.env`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import recsys_norm
from recsys_norm import _versions

MIN_CAPABILITY = (8, 0)
_OPS = ("norm", "norm_linear", "linear_norm", "linear_norm_linear", "norm_attention")


def record() -> dict[str, str | None]:
    """The `env` record of summary.json: gpu, driver, torch, triton, torchrec, fbgemm, python, git_commit.

    Every value is a string; None where the machine lacks it. Initialises CUDA if there is a CUDA device.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_cuda else None,
        "driver": _driver_version() if has_cuda else None,
        "torch": torch.__version__,
        "triton": _versions.version_of("triton"),
        "torchrec": _versions.version_of("torchrec"),
        "fbgemm": next(iter(_versions.fbgemm_builds().values()), None),
        "python": platform.python_version(),
        "git_commit": git_commit(),
    }


def git_commit() -> str | None:
    """The commit of the checkout this package is imported from, with `-dirty` after it when files differ.

    None outside a checkout, as for a wheel installed in a virtual environment that lies inside some repository.
    """
    here = Path(recsys_norm.__file__).parent
    if _output("git", "-C", str(here), "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _output("git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def backends() -> dict[str, str | None]:
    """{backend: None if its own kernels can run here, else the reason why not}."""
    kernels = {name: _why_no_kernels(name) for name in ("naive", "fused")}
    return {"unfused": None, "compiled": _why_no_compile(), **kernels}


def _why_no_kernels(backend: str) -> str | None:
    import torch

    if not torch.cuda.is_available():
        return f"{_why_no_cuda()}; unfused runs here, and on_unsupported=fallback takes it and counts it"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"compute capability {_dotted(capability)}, the kernels need {_dotted(MIN_CAPABILITY)} or newer"
    if _versions.version_of("triton") is None:
        return "triton is not installed (pip install triton)"
    from recsys_norm.ops import registry

    kernels = {t.name for op in _OPS for t in registry.techniques(op) if t.provider != "torch"}
    if not kernels or (backend == "naive" and "naive" not in kernels):
        return "no kernel of it is installed; unfused runs here"
    return None


def _why_no_compile() -> str | None:
    import torch

    names = [os.environ.get("CXX"), "g++", "clang++"]
    if torch.cuda.is_available():
        if _versions.version_of("triton") is None:
            return "torch.compile needs triton on CUDA, and it is not installed (pip install triton)"
        names = [os.environ.get("CC"), "gcc", "clang"]
    if not any(name and shutil.which(name.split()[0]) for name in names):
        return f"torch.compile needs a compiler, none of {', '.join(filter(None, names))} is on the PATH"
    return None


def _why_no_cuda() -> str:
    import torch

    if torch.version.cuda is None:
        return "no CUDA device: this torch is a build without CUDA"
    if _driver_version() is None:
        return "no CUDA device: no NVIDIA driver answers (nvidia-smi)"
    return f"no CUDA device: torch {torch.__version__} finds none, driver {_driver_version()} answers"


def _trio() -> str:
    try:
        _versions.require_torchrec()
    except ImportError as error:
        return str(error)
    return f"torch, torchrec and fbgemm fit together ({_versions.versions_found()})"


def report() -> str:
    """The text that `python -m recsys_norm.env` prints."""
    import torch

    builds = _versions.fbgemm_builds()
    facts = {
        "recsys_norm": recsys_norm.__version__ + (f" at {commit}" if (commit := git_commit()) else ""),
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": f"{_cpu_name()}, {os.cpu_count()} logical cores",
        "gpu": "; ".join(_gpus()) or f"none ({_why_no_cuda()})",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'not built in'})",
        "torchrec": _versions.version_of("torchrec"),
        "fbgemm": ", ".join(f"{version} ({name})" for name, version in builds.items()),
    }
    for name, distribution in {"triton": "triton", "torchmetrics": "torchmetrics", "hydra": "hydra-core"}.items():
        facts[name] = _versions.version_of(distribution)
    facts["set"] = "CPU set" if torch.version.cuda is None else "CUDA set"
    facts["trio"] = _trio()
    lines = [f"{name:<14}{value or 'not installed'}" for name, value in facts.items()]
    lines.append("backends")
    lines += [f"  {name:<12}{'runs here' if why is None else 'no: ' + why}" for name, why in backends().items()]
    return "\n".join(lines)


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    driver = _driver_version() or "unknown"
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = _dotted((properties.major, properties.minor))
        memory = properties.total_memory / 2**30
        names.append(f"{properties.name}, capability {capability}, {memory:.0f} GiB, driver {driver}")
    return names


def _driver_version() -> str | None:
    answer = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _output(*command: str) -> str | None:
    """What a command prints, None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


if __name__ == "__main__":
    print(report())
