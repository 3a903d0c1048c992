"""The package as it is installed: what an import costs, what a wheel holds, and what a broken torchrec does."""

import ast
import importlib.metadata
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import recsys_norm
from recsys_norm import _versions, env

ROOT = Path(__file__).parents[1]
FOLDERS = {"recsys_norm": "recsys_norm", "kernels": "recsys_norm/kernels", "configs": "recsys_norm/configs"}

RUN_AN_OP = """
import torch
from recsys_norm import ops
x, weight = torch.randn(5, 16, requires_grad=True), torch.randn(8, 16)
y = ops.norm_linear(x, weight, norm="rms", backend="unfused")
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (16,), eps=1e-5) @ weight.T)
y.square().sum().backward()
assert x.grad.isfinite().all()
"""


def run(*command, path=(), cwd=None):
    """Run a command in an environment that knows nothing of this process but `path`."""
    settings = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    settings["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run([*map(str, command)], env=settings, cwd=cwd, capture_output=True, text=True, timeout=300)


def python(*arguments, path=(), isolated=False, cwd=None):
    """Run this interpreter with `path` in front; isolated: on `path` and the standard library alone."""
    return run(sys.executable, *(["-S"] if isolated else []), *arguments, path=path, cwd=cwd)


def succeeds(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# ---- imports ---------------------------------------------------------------------------------------------------------


def test_import_loads_nothing_heavy():
    succeeds(
        python(
            "-c",
            "import sys, recsys_norm\n"
            "loaded = {'torch', 'triton', 'torchrec', 'fbgemm_gpu', 'numpy', 'hydra'} & sys.modules.keys()\n"
            "assert not loaded, loaded\n"
            "import torch, recsys_norm.ops, recsys_norm.nn, recsys_norm.reference, recsys_norm.testing\n"
            # not triton: torch's FLOP counter, which knows the ops, imports it where it is installed
            "loaded = {'torchrec', 'fbgemm_gpu', 'hydra', 'recsys_norm.kernels'} & sys.modules.keys()\n"
            "assert not loaded, loaded\n"
            "assert not torch.cuda.is_initialized()",
        )
    )


def test_submodules_are_imported_by_name():
    assert recsys_norm.env is env
    assert {"ops", "nn", "models"} <= set(dir(recsys_norm))
    with pytest.raises(AttributeError, match="no attribute 'opps'"):
        recsys_norm.opps  # noqa: B018


def test_the_checkout_is_what_runs():
    import recsys_norm.configs
    import recsys_norm.kernels

    for folder, module in zip(FOLDERS, (recsys_norm, recsys_norm.kernels, recsys_norm.configs)):
        assert Path(module.__file__).parent == ROOT / folder
    assert importlib.metadata.version("recsys-norm") == recsys_norm.__version__


# ---- the wheel -------------------------------------------------------------------------------------------------------


class Environment(NamedTuple):
    """A virtual environment in another folder: the wheel, and the packages that it depends on."""

    bin: Path
    packages: Path  # its site-packages

    def python(self, *arguments, cwd):
        return run(self.bin / "python", *arguments, cwd=cwd)


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """This checkout's wheel, installed. Built from a copy: a build folder keeps deleted files."""
    base = tmp_path_factory.mktemp("wheel")
    source, wheels, venv = base / "source", base / "wheels", base / "venv"
    source.mkdir()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = ("-m", "pip", "--disable-pip-version-check", "-q")
    succeeds(python(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, source))
    (wheel,) = wheels.glob("*.whl")
    succeeds(python("-m", "venv", "--without-pip", venv))
    folders = sysconfig.get_paths(vars={"base": str(venv), "platbase": str(venv)})
    target = Environment(Path(folders["scripts"]), Path(folders["purelib"]))
    # A path file lends what is installed here, but for this checkout: path files inside such a folder are not read.
    write(target.packages / "dependencies.pth", sysconfig.get_path("purelib") + "\n")
    into = ("--python", target.bin / "python")
    succeeds(python(*pip, *into, "install", "--no-deps", "--no-index", "--no-compile", "--ignore-installed", wheel))
    return target


def test_wheel_holds_every_file(installed):
    for folder, place in FOLDERS.items():
        missing = [
            str(file.relative_to(ROOT))
            for file in sorted((ROOT / folder).rglob("*"))
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".md"
            if not (installed.packages / place / file.relative_to(ROOT / folder)).exists()
        ]
        assert not missing, f"add to `packages` or `package-data` in pyproject.toml: {missing}"
    assert not {"kernels", "configs", "tests", "docs"} & {entry.name for entry in installed.packages.iterdir()}


def test_wheel_works_in_another_folder(installed, tmp_path):
    code = (
        RUN_AN_OP + "import recsys_norm, recsys_norm.kernels, recsys_norm.configs\n"
        "for module in (recsys_norm, recsys_norm.kernels, recsys_norm.configs): print(module.__file__)"
    )
    for line in succeeds(installed.python("-c", code, cwd=tmp_path)).split():
        assert Path(line).is_relative_to(installed.packages)


OUTSIDE_CONFIG = """# @package _global_
defaults:
  - override /model: kunlun_tiny
  - override /backend: unfused
  - override /optimizer: outside
  - override /logger: quiet
trainer: {max_steps: 3, eval_batches: 1, timing_warmup: 1, threads: 1}
model: {batch_size: 32}
data: {num_workers: 0, train_rows: 1024, validation_rows: 64, test_rows: 64, bayes_rows: 1024}
"""


def test_wheel_trains_with_a_config_from_outside(installed, tmp_path):
    """The console script, a config folder of the user's, kunlun_tiny."""
    write(tmp_path / "mine" / "experiment" / "outside.yaml", OUTSIDE_CONFIG)
    write(tmp_path / "mine" / "optimizer" / "outside.yaml", "defaults: [adamw]\ndense: {lr: 0.00123}\n")
    command = installed.bin / "recsys-norm-train"
    succeeds(run(command, "--config-dir", "mine", "experiment=outside", "hydra.run.dir=out", cwd=tmp_path))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["model"], summary["backend"], summary["steps"]) == ("kunlun_tiny", "unfused", 3)
    assert math.isfinite(summary["loss"]) and summary["batch"] == 32
    assert "0.00123" in (tmp_path / "out" / ".hydra" / "config.yaml").read_text()


def imported(*roots):
    """Top-level modules that the files import, as in `import a.b` and `from a.b import c`."""
    for path in itertools.chain.from_iterable((ROOT / root).rglob("*.py") for root in roots):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield node.module.split(".")[0]


def test_dependencies_name_what_is_imported():
    project = (ROOT / "pyproject.toml").read_text()
    lines = re.findall(r"^(?:dependencies|train|helion) = \[(.*?)\](?:  #.*)?$", project, re.M | re.S)
    named = {name.lower() for line in lines for name in re.findall(r'"([\w-]+)', line)}
    named |= {"torchrec", "fbgemm-gpu"}  # extra torchrec-cuda, or the pair for the CPU
    named |= {"triton", "cuda"}  # come with torch for CUDA; without them the kernels say why they cannot run
    distributions = importlib.metadata.packages_distributions()
    missing = {}
    for module in set(imported("recsys_norm", "kernels", "configs")) - set(sys.stdlib_module_names):
        names = {name.lower().replace("_", "-") for name in distributions.get(module, [module])}
        if not {module, *names, *(name.removesuffix("-cpu") for name in names)} & (named | {"recsys_norm"}):
            missing[module] = names
    assert not missing, f"name them in pyproject.toml: {missing}"


# ---- torchrec or fbgemm missing or broken ----------------------------------------------------------------------------


def distribution(folder, name, version):
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    write(folder / f"{name}-{version}.dist-info" / "METADATA", metadata)


def undefined_symbol(folder):
    write(folder / "fbgemm_gpu" / "__init__.py", "raise OSError('fbgemm_gpu_py.so: undefined symbol: _ZN3c105Error')")


def no_operators(folder):
    write(folder / "fbgemm_gpu" / "__init__.py", "")
    write(folder / "torchrec" / "__init__.py", "")


def torchrec_uses_missing_operator(folder):
    write(folder / "fbgemm_gpu" / "__init__.py", "")
    write(folder / "torchrec" / "__init__.py", "import torch\ntorch.ops.fbgemm.jagged_2d_to_dense")


def other_torch_minor(folder):
    distribution(folder, "fbgemm_gpu_cpu", "1.6.0")


def other_torchmetrics(folder):
    distribution(folder, "torchmetrics", "1.9.0")


# what is broken -> what the error has to say besides the versions
BROKEN = {
    undefined_symbol: "OSError: fbgemm_gpu_py.so: undefined symbol: _ZN3c105Error",
    no_operators: "AttributeError: '_OpNamespace' 'fbgemm' object has no attribute",
    torchrec_uses_missing_operator: "AttributeError: '_OpNamespace' 'fbgemm' object has no attribute",
    other_torch_minor: "fbgemm-gpu-cpu 1.6.0 is built for torch 2.11, and torch is",
    other_torchmetrics: "needs torchmetrics 1.0.3, found 1.9.0",
}

USE_THE_MODEL = """
from recsys_norm.data.schema import IdFeature, Schema, Table
from recsys_norm.models.config import ModelConfig
from recsys_norm.models.kunlun import Kunlun
schema = Schema(dense=4, sparse=(IdFeature("page", "pages"),), candidates=(), events=(), tables=(Table("pages", 9),))
try:
    Kunlun(ModelConfig(), schema)
    raise SystemExit("the model was built")
except ImportError as error:
    message = str(error)
try:
    import recsys_norm.data.batch
    raise SystemExit("the batch was imported")
except ImportError as error:
    assert str(error) == message, f"{error!r} is not {message}"
print(message)
"""


@pytest.mark.parametrize("breakage", BROKEN, ids=lambda f: f.__name__)
def test_ops_work_and_the_model_explains(breakage, tmp_path):
    breakage(tmp_path)
    message = succeeds(python("-c", RUN_AN_OP + USE_THE_MODEL, path=[tmp_path]))
    assert BROKEN[breakage] in message
    found = {name: _versions.version_of(name) for name in ("torch", "torchrec")}
    assert f"Found torch {found['torch']}, torchrec {found['torchrec']}, fbgemm-gpu" in message
    assert re.search(r"To mend it, run: pip install .*torchrec~=1\.\d+\.0 fbgemm-gpu\S*~=1\.\d+\.0 .*\n$", message)


def test_the_program_says_it_in_one_line(tmp_path):
    undefined_symbol(tmp_path)
    done = python(ROOT / "train.py", f"hydra.run.dir={tmp_path}/run", path=[tmp_path], cwd=tmp_path)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "undefined symbol: _ZN3c105Error" in done.stderr and "To mend it, run: pip install " in done.stderr


def test_ops_work_where_torchrec_fbgemm_triton_and_hydra_are_absent(tmp_path):
    absent = ("torchrec", "fbgemm", "triton", "hydra", "omegaconf", "__editable__")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(absent):
            (tmp_path / entry.name).symlink_to(entry)
    for folder, place in FOLDERS.items():
        if folder == place:
            (tmp_path / place).symlink_to(ROOT / folder)
    message = succeeds(python("-c", RUN_AN_OP + USE_THE_MODEL, path=[tmp_path], isolated=True))
    assert "torchrec is not installed" in message and "fbgemm-gpu (not installed)" in message
    report = succeeds(python("-m", "recsys_norm.env", path=[tmp_path], isolated=True))
    assert re.search(r"^torchrec +not installed$", report, re.M)


@pytest.mark.parametrize(
    ("torch_version", "cuda", "command"),
    [
        ("2.11.0+cpu", None, "pip install --force-reinstall --no-deps torchrec~=1.6.0 fbgemm-gpu-cpu~=1.6.0 "),
        ("2.12.1", "13.0", "pip install --force-reinstall --no-deps torchrec~=1.7.0 fbgemm-gpu~=1.7.0 "),
        ("2.14.0a0+git1", "13.0", "pip install --force-reinstall --no-deps torchrec~=1.9.0 fbgemm-gpu~=1.9.0 "),
        ("2.9.1", "12.8", "pip install torch~=2.13.0 fbgemm-gpu~=1.8.0 "),
    ],
)
def test_mend_command_follows_torch(torch_version, cuda, command, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert _versions.mend_command().startswith(command)


FITTING = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0", "torchmetrics": "1.0.3"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"fbgemm-gpu": None, "fbgemm-gpu-nightly": "2026.7.1"}, None),
        ({"torch": "2.10.0"}, "torch 2.10.0 is outside the supported versions 2.11 to 2.14"),
        ({"torch": "2.14.1"}, "fbgemm-gpu 1.8.0 is built for torch 2.13, and torch is 2.14.1"),
        ({"torchrec": None}, "torchrec is not installed"),
        ({"fbgemm-gpu": None}, "fbgemm is not installed"),
        ({"torchmetrics": None}, "needs torchmetrics 1.0.3, found none"),
    ],
)
def test_mismatch_reads_the_versions(change, reason, monkeypatch):
    monkeypatch.setattr(_versions, "version_of", (FITTING | change).get)
    found = _versions.mismatch()
    assert found is None if reason is None else reason in found


def test_requirements_pin_a_fitting_set():
    pins = {}
    for file in (ROOT / "requirements").glob("*.txt"):
        text = file.read_text()
        assert "://" not in text and "index-url" not in text
        pins |= dict(re.findall(r"^([\w-]+)==([\w.]+)", text, re.M))
    assert pins["fbgemm-gpu"] == pins["fbgemm-gpu-cpu"]
    assert _versions.FBGEMM_FOR_TORCH[_versions.minor(pins["torch"])] == _versions.minor(pins["fbgemm-gpu"])
    assert pins["torchmetrics"] == _versions._torchmetrics_pin()
    assert _versions.minor(pins["torch"]) == _versions.TESTED_TORCH


# ---- python -m recsys_norm.env ---------------------------------------------------------------------------------------


def test_env_command():
    report = succeeds(python("-m", "recsys_norm.env", cwd=ROOT))
    for name in "recsys_norm python os cpu gpu torch torchrec fbgemm triton torchmetrics hydra set trio".split():
        assert re.search(rf"^{name} +\S", report, re.M), name
    assert "torch, torchrec and fbgemm fit together" in report
    assert re.search(r"^  unfused +runs here$", report, re.M)
    if not torch.cuda.is_available():
        assert re.search(r"^  fused +no: no CUDA device", report, re.M)


def test_env_record_has_the_fields_of_a_summary():
    record = env.record()
    assert list(record) == ["gpu", "driver", "torch", "triton", "torchrec", "fbgemm", "python", "git_commit"]
    assert record["torch"] == torch.__version__ and record["torchrec"] == _versions.version_of("torchrec")
    assert (record["gpu"] is None) == (not torch.cuda.is_available())


def test_git_commit_is_this_checkouts(tmp_path, monkeypatch):
    package = tmp_path / "recsys_norm"
    write(package / "__init__.py", "")
    monkeypatch.setattr(recsys_norm, "__file__", str(package / "__init__.py"))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    assert env.git_commit() is None  # a package inside a repository that does not hold it
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "second"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert env.git_commit() == head
    write(package / "__init__.py", "changed = True")
    assert env.git_commit() == f"{head}-dirty"


def test_backends_name_what_a_gpu_lacks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert env.backends()["fused"] == "compute capability 7.5, the kernels need 8.0 or newer"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(_versions, "version_of", lambda name: None)
    assert "triton is not installed" in env.backends()["naive"]
    assert "needs triton on CUDA" in env.backends()["compiled"]


# ---- the suite itself ------------------------------------------------------------------------------------------------


def test_unwritten_memory_is_nan():
    assert torch.empty(100).isnan().all() and torch.zeros(2, 3).new_empty(5).isnan().all()
    assert torch.empty_strided((4, 2), (2, 1), dtype=torch.bfloat16).isnan().all()


def test_ruff_finds_nothing():
    pytest.importorskip("ruff")
    succeeds(
        python("-m", "ruff", "check", "--no-cache", "recsys_norm", "kernels", "tests", "docs", "examples", cwd=ROOT)
    )


# ---- make ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_installs_once_per_set_of_requirements(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / ".venv").mkdir()

    def make(*arguments):
        settings = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL")}
        command = ["make", *arguments, "SET=cpu"]
        return succeeds(subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True))

    assert " -m pip " in make("-n", "install")
    make("-t", "install")
    assert " -m pip " not in make("-n", "install")
    with open(tmp_path / "requirements" / "base.txt", "a") as base:
        base.write("six\n")
    assert " -m pip " in make("-n", "install")
