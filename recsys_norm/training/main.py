"""The command line program: composes the configuration, prepares the process, hands over to the trainer.

`python train.py key=value ...`, `python train.py -m group=a,b` and the console script `recsys-norm-train` are the same
`main`. An error in the configuration is one line on stderr and exit code 1; HYDRA_FULL_ERROR=1 shows the traceback.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
import torch
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recsys_norm._versions import require_torchrec
from recsys_norm.training import config as configs
from recsys_norm.training import multirun, runtime
from recsys_norm.training.config import ConfigError

_FULL_ERROR = "HYDRA_FULL_ERROR"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program with the command line `argv` (default: that of the process).

    Exits with 0 when training ended by itself, 1 after an error, and 128 + the signal's number after a signal that
    stopped it early.
    """
    argv = list(sys.argv if argv is None else argv)
    world = runtime.world()
    if world.store is None:
        runtime.run_stamp.cache_clear()  # every call is a run of its own
    before = sys.argv, os.environ.get(_FULL_ERROR)
    show_traceback = before[1] == "1"
    os.environ[_FULL_ERROR] = "1"  # makes Hydra raise instead of printing several lines
    try:
        register()
        sys.argv = _with_rank_settings(_completed(argv), world.rank)
        hydra.main(version_base="1.3", config_path="pkg://recsys_norm.configs", config_name="config")(_job)()
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        if show_traceback:
            raise
        _fail(one_line(error), world.rank)
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = before[1]


def register() -> None:
    """Make the structured configs and the resolvers `run_dir` and `run_stamp` known to Hydra."""
    configs.register()
    OmegaConf.register_new_resolver("run_stamp", runtime.run_stamp, replace=True)
    OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
    OmegaConf.register_new_resolver("by_device", _by_device, replace=True)


def _by_device(device: str, on_cpu: Any, on_cuda: Any) -> Any:
    """For `${by_device:${trainer.device},1,2}`."""
    return on_cuda if device != "cpu" and torch.cuda.is_available() else on_cpu


def _run_dir(resume: str | None) -> str:
    return resume or f"outputs/{runtime.run_stamp()}"


def _job(config: DictConfig) -> dict[str, Any] | str:
    """One job of Hydra: a run, or one point of a sweep, whose run may be put off (see `multirun`).

    Expected errors end the program here, with one line.
    """
    try:
        require_torchrec()
    except ImportError as error:  # versions that do not fit; the message holds the command that mends them
        _fail(one_line(error), runtime.world().rank)
    from recsys_norm.training.run import run

    if multirun.deferred(config.compare.isolate):
        checked(config)  # a value that cannot work is said before the first run
        return multirun.DEFERRED
    try:
        return run(checked(config), Path(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir))
    except runtime.Stopped as stopped:
        raise SystemExit(128 + stopped.signal) from None
    except runtime.expected_errors() as error:
        _fail(one_line(error), runtime.world().rank)


def checked(config: DictConfig) -> configs.Config:
    """The checked configuration; `data` stays a node for `hydra.utils.instantiate`."""
    _refuse_added_keys(config, "")
    data = config.data
    try:
        result = OmegaConf.to_object(config)
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error
    result.data = data
    return result


def _refuse_added_keys(node: DictConfig, prefix: str) -> None:
    """`+group.key=value` gets past Hydra's check of structured configs, and would do nothing."""
    kind = OmegaConf.get_type(node)
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(node)
    for name in node:
        if name not in fields:
            raise ConfigError(_unknown_key(f"{prefix}{name}", f"Key '{name}' not in '{kind.__name__}'"))
        value = node._get_node(name)
        if isinstance(value, DictConfig) and not value._is_none() and not value._is_interpolation():
            _refuse_added_keys(value, f"{prefix}{name}.")


def _fail(message: str, rank: int) -> NoReturn:
    """Exit with one line. The other ranks leave rank 0 time for it: torchrun stops it as soon as one of them ends."""
    if rank:
        time.sleep(2)
    print(f"error: {message}" if rank == 0 else f"error on rank {rank}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def one_line(error: BaseException) -> str:
    """The error in one line that starts with the key it is about, where the error knows one."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = f"{error}\n{cause}"
    key = re.search(r"full_key: (\S+)", text) or re.search(r"override '?([\w./@-]+)", text)
    lines = [line.strip() for line in str(cause).splitlines()]
    message = " ".join(
        line for line in lines if line and not re.match(r"(full_key|object_type|reference_type)\b", line)
    )
    if not message:
        message = " ".join(str(error).split())
    message = message.split(" Config search path:")[0]
    if re.search(r"not in struct|Key '.*' not in", message):
        message = _unknown_key(key.group(1) if key else "", message)
    elif key and key.group(1) not in message:
        message = f"{key.group(1)}: {message}"
    return message


def _unknown_key(key: str, message: str) -> str:
    if key.startswith("distributed.tables."):  # Hydra wants to be told that a key of a dictionary is a new one
        return f"{key}: write +{key}=[..] for a table that has no sharding types yet"
    close = difflib.get_close_matches(key, list(_known_keys()), n=1, cutoff=0.7)
    hint = f"; did you mean {close[0]}?" if close else ""
    detail = re.search(r"Key '.*", message)
    return f"{key}: there is no such key ({detail.group() if detail else message}){hint}"


def _known_keys() -> Iterator[str]:
    """Dotted keys of the structured configs that belong to this package."""
    for name, group in configs.GROUPS.items():
        yield name
        for field, value in OmegaConf.structured(group).items_ex(resolve=False):
            yield f"{name}.{field}"
            if OmegaConf.is_dict(value):
                yield from (f"{name}.{field}.{inner}" for inner in value)
    yield from ("attention", "model", "data", "experiment", "debug")


def _with_resumed_overrides(argv: list[str]) -> list[str]:
    """Put the overrides that the resumed run was started with in front of `trainer.resume=<run dir>`.

    `trainer.resume=<run dir>` alone then continues that run; a key that is given again replaces the old value.
    """
    index = next((i for i, arg in enumerate(argv) if re.match(r"\+*trainer\.resume=", arg)), None)
    if index is None or {"-m", "--multirun"} & set(argv):
        return argv
    directory = Path(argv[index].split("=", 1)[1].strip("'\""))
    saved = directory / ".hydra" / "overrides.yaml"
    if not directory.is_dir():
        raise ConfigError(f"trainer.resume: there is no run directory {str(directory)!r}")
    if not saved.exists():
        return argv
    given = {_key(arg) for arg in argv[1:]}
    old = [arg for arg in OmegaConf.to_container(OmegaConf.load(saved)) if _key(arg) not in given]
    return [*argv[:index], *old, *argv[index:]]


def _with_comparison(argv: list[str]) -> list[str]:
    """A sweep over backends or attentions that names no experiment is `experiment=comparison`."""
    if not {"-m", "--multirun"} & set(argv) or {"experiment", "debug"} & {_key(arg) for arg in argv[1:]}:
        return argv
    paths = r"(backend|attention|backend\.compile)=.*(,|\()"
    first = next((index for index, arg in enumerate(argv) if re.match(paths, arg)), None)
    return argv if first is None else [*argv[:first], "experiment=comparison", *argv[first:]]


def _completed(argv: list[str]) -> list[str]:
    """The command line with what follows from it."""
    return _with_model_of_data(_with_comparison(_with_resumed_overrides(argv)))


def _with_model_of_data(argv: list[str]) -> list[str]:
    """`data=movielens` without a model takes the one whose size suits 100,000 rows, as `experiment=movielens` does."""
    if "data=movielens" not in argv or {"model", "experiment", "debug"} & {_key(arg) for arg in argv[1:]}:
        return argv
    index = argv.index("data=movielens")
    return [*argv[:index], "model=kunlun_mini", *argv[index:]]


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def _with_rank_settings(argv: list[str], rank: int) -> list[str]:
    """Only rank 0 writes Hydra's files and logs."""
    quiet = ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    return [*argv, *quiet] if rank else argv
