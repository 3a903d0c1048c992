"""Checkpoints of a run, complete or not there at all.

    checkpoints/step-00000200/   what torch.distributed.checkpoint wrote, progress.json, and rank-<r>.pt with the
                                 random generators and the data position of each rank
    checkpoints/best             link to the step with the best validation value

A checkpoint is written into a hidden folder, flushed to disk and renamed, so a folder named `step-*` is complete and
the previous one exists until then. Tensors may be loaded with another number of ranks or another placement of tables.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from recsys_norm.training.runtime import RunError, Runtime
from recsys_norm.training.sharding import local_parts

log = logging.getLogger(__name__)

_PREFIX = "step-"


class Checkpoints:
    """The checkpoints of one run directory.

    `tensors` maps names to tensors (plain or sharded) that are saved and loaded in place, `progress` is a JSON value
    that is the same on all ranks, `local` any nest of plain values and tensors of this rank.
    """

    def __init__(self, run_dir: Path, runtime: Runtime, *, keep_last: int = 1) -> None:
        self.folder = Path(run_dir) / "checkpoints"
        self._runtime = runtime
        self._keep_last = keep_last
        self._processes = {"process_group": runtime.cpu_group, "no_dist": runtime.cpu_group is None}

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        names = [path.name for path in self.folder.glob(f"{_PREFIX}*") if path.is_dir()]
        return sorted(int(name.removeprefix(_PREFIX)) for name in names)

    def path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:08d}"

    def save(self, step: int, tensors: dict[str, Any], progress: dict[str, Any], local: Any, best: int | None) -> bool:
        """Write the checkpoint of `step`, then drop those that are neither among the last nor the best. One that is
        there already (a resumed run at the step where it stopped) stays as it is.

        Where writing fails (a full disk), the earlier checkpoints stay, a warning says so, and the answer is False.
        """
        there = self._runtime.broadcast(self.path(step).exists())
        error = None if there else self._write(step, tensors, progress, local)
        failures = [message for message in self._all(error) if message]
        if failures:
            known = self.steps()
            kept = f"the last complete one is of step {known[-1]}" if known else "there is no complete one"
            log.warning(f"the checkpoint of step {step} could not be written: {failures[0]}; {kept} in {self.folder}")
            return False
        if self._runtime.main:
            self._drop_old(best)
        self._runtime.barrier()
        return True

    def _write(self, step: int, tensors: dict[str, Any], progress: dict[str, Any], local: Any) -> str | None:
        """The reason of a failure on this rank, None after success."""
        hidden, final = self.folder / f".{_PREFIX}{step:08d}", self.path(step)
        error = None
        try:
            if self._runtime.main:
                shutil.rmtree(hidden, ignore_errors=True)
                hidden.mkdir(parents=True)
        except OSError as failure:
            error = str(failure)
        if any(self._all(error)):
            return error
        try:
            with _quiet():
                dcp.save(tensors, storage_writer=dcp.FileSystemWriter(hidden, sync_files=True), **self._processes)
            _write_synced(hidden / f"rank-{self._runtime.rank}.pt", local)
            if self._runtime.main:
                _write_synced(hidden / "progress.json", progress)
        except (OSError, RuntimeError, dcp.CheckpointException) as failure:
            error = _reason(failure)
        complete = not any(self._all(error))
        if self._runtime.main:
            if complete:
                _sync_folder(hidden)
                os.replace(hidden, final)
                _sync_folder(self.folder)
            else:
                shutil.rmtree(hidden, ignore_errors=True)
        return error

    def _all(self, error: str | None) -> list[str | None]:
        """Every rank's error, so that all take the same way."""
        if self._runtime.cpu_group is None:
            return [error]
        errors: list[str | None] = [None] * self._runtime.size
        torch.distributed.all_gather_object(errors, error, group=self._runtime.cpu_group)
        return errors

    def _drop_old(self, best: int | None) -> None:
        steps = self.steps()
        keep = {*steps[-self._keep_last :], best}
        if best is not None:
            link = self.folder / ".best"
            link.unlink(missing_ok=True)
            link.symlink_to(self.path(best).name)
            os.replace(link, self.folder / "best")
        for step in steps:
            if step not in keep:
                shutil.rmtree(self.path(step), ignore_errors=True)

    def progress(self, step: int) -> dict[str, Any]:
        return json.loads((self.path(step) / "progress.json").read_text())

    def local(self, step: int, rank: int) -> Any:
        """What that rank saved as its own."""
        return torch.load(self.path(step) / f"rank-{rank}.pt", weights_only=True)

    def load(self, step: int, tensors: dict[str, Any]) -> None:
        """Fill `tensors` in place.

        Raises:
            RunError: listing what is missing, left over or of another shape, before anything is changed.
        """
        reader = dcp.FileSystemReader(self.path(step))
        saved = reader.read_metadata().state_dict_metadata
        problems, regrouped = [], {}
        if missing := sorted(set(tensors) - set(saved)):
            problems.append(f"it lacks {_listed(missing)}")
        for name in sorted(set(tensors) & set(saved)):
            entry = saved[name]
            if not isinstance(entry, TensorStorageMetadata) or entry.size == tensors[name].size():
                continue
            rows = _rows_of_sums(name, tensors)
            if rows and entry.size[0] % rows == 0:
                regrouped[name] = torch.zeros(entry.size), rows
            else:
                problems.append(f"{name} has shape {list(entry.size)} and the model {list(tensors[name].size())}")
        if problems:
            raise RunError(
                f"the checkpoint {self.path(step)} does not fit this model: {'; '.join(problems[:4])}; "
                "use the model and data settings of the run that saved it"
            )
        plain = {name: tensor for name, tensor in tensors.items() if name not in regrouped}
        sums = {name: tensor for name, (tensor, _) in regrouped.items()}
        with _quiet():
            dcp.load(plain | sums, storage_reader=reader, **self._processes)
        for name, (values, rows) in regrouped.items():
            _take_row_sums(tensors[name], values.view(-1, rows).mean(0))

    def adopt(self, other: Checkpoints, step: int, best: int | None) -> None:
        """Take over the checkpoints of another run that this one continues, as hard links where the disk allows it."""
        if self._runtime.main and other.folder.resolve() != self.folder.resolve():
            for taken in {step, best} - {None}:
                shutil.rmtree(self.path(taken), ignore_errors=True)
                shutil.copytree(other.path(taken), self.path(taken), copy_function=_link)
            self._drop_old(best)
        self._runtime.barrier()


def _rows_of_sums(name: str, tensors: dict[str, Any]) -> int | None:
    """Rows of the table whose row-wise optimizer state has that name; None for another tensor.

    A table that is sharded by columns has one sum per row and shard. The sum of the whole row would have been their
    mean, so that is what other shardings take over, and a shard takes the sum of the whole row for its own.
    """
    prefix, _, table = name.removeprefix("optimizer/tables/").rpartition("/")
    weight = tensors.get(f"sparse/{prefix}")
    return weight.size()[0] if name.startswith("optimizer/tables/") and table and weight is not None else None


def _take_row_sums(target: Any, sums: torch.Tensor) -> None:
    for part, offsets in local_parts(target):
        first = offsets[0] % len(sums)
        part.copy_(sums[first : first + len(part)])


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _reason(failure: BaseException) -> str:
    """The first cause inside what torch.distributed.checkpoint collects from the ranks."""
    inner = getattr(failure, "failures", None)
    if inner:
        failure = next(iter(inner.values()))[0]
    return " ".join(str(failure).split()) or type(failure).__name__


def _write_synced(path: Path, value: Any) -> None:
    with open(path, "wb") as file:
        if path.suffix == ".json":
            file.write(json.dumps(value).encode())
        else:
            torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.distributed.checkpoint warns about deprecations inside itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
