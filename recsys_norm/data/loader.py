"""Loaders that any data set shares: which rows a rank gets at each step, worker processes, exact resume.

A step takes `world_size * batch_size` consecutive positions of the epoch's order and splits them evenly over the ranks,
so the union over ranks is what one rank with the larger batch would see, every row is used once, and all ranks take the
same number of steps (a rank's share of the last step may be smaller, or empty).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from recsys_norm.data.batch import Batch


class Rows(Protocol):
    """A split of a data set in some order. Must be picklable: worker processes get a copy."""

    def __len__(self) -> int: ...

    def fetch(self, epoch: int, begin: int, end: int) -> Batch:
        """The rows at positions begin .. end - 1 of the epoch's order; begin == end gives a batch of zero rows."""


class Loader(StatefulDataLoader):
    """Iterates over one epoch of `rows` in batches of this rank.

    Each `iter()` starts at the first step, except the first one after `load_state_dict`, which continues with the batch
    after the last one that was yielded. With `advance` (training) a completed pass moves on to the next epoch.

    The state is a position in the epoch's order, not the state of the worker processes: batches are a function of
    (epoch, position), so a run can be continued with another number of workers, ranks or rows per batch.
    num_workers None: up to 4 where CUDA is available, else 0. pin_memory None: where CUDA is available.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        epoch: int = 0,
        advance: bool = False,
        num_workers: int | None = None,
        prefetch: int = 2,
        pin_memory: bool | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0 .. world_size - 1, got rank {rank} with world_size {world_size}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        cuda = torch.cuda.is_available()
        if num_workers is None:
            num_workers = min(4, (os.cpu_count() or 1) - 1) if cuda else 0
        self.rows = rows
        self.epoch = epoch
        self._advance = advance
        self._position = 0  # rows of all ranks that were yielded in this epoch
        self._steps = _Steps(len(rows), batch_size, rank, world_size)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
            super().__init__(
                _Fetch(rows),
                batch_size=None,
                sampler=self._steps,
                num_workers=num_workers,
                prefetch_factor=prefetch if num_workers else None,
                persistent_workers=num_workers > 0 and advance,
                pin_memory=cuda if pin_memory is None else pin_memory,
                generator=torch.Generator(),  # seeds of workers, which draw nothing: leave the global generator alone
            )

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank."""
        return self._steps.count(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass. Keeps the position when the epoch is the current one."""
        if epoch != self.epoch:
            self.epoch, self._position, self._steps.first = epoch, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        position = self._steps.first
        self._steps.epoch = self.epoch
        self._position = position
        batches = super().__iter__()
        self._steps.first = 0
        for batch in batches:
            position += self._steps.global_batch
            self._position = min(position, self._steps.total)
            yield batch
        self._position = 0
        self.epoch += self._advance

    def state_dict(self) -> dict[str, Any]:
        """Position after the last batch that was yielded; prefetched batches do not count."""
        return {"epoch": self.epoch, "position": self._position, "rows": self._steps.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["rows"] != self._steps.total:
            raise ValueError(
                f"the saved position belongs to a split of {state_dict['rows']} rows and this split has "
                f"{self._steps.total}; resume with the data settings of the saved run"
            )
        self.epoch = state_dict["epoch"]
        self._position = self._steps.first = state_dict["position"]


class _Steps(Sampler):
    """Yields (epoch, begin, end) for each step of one rank, from position `first` on."""

    def __init__(self, total: int, batch_size: int, rank: int, world_size: int) -> None:
        self.total = total
        self.global_batch = batch_size * world_size
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.first = 0

    def count(self, first: int) -> int:
        return -(-max(self.total - first, 0) // self.global_batch)

    def __len__(self) -> int:
        return self.count(self.first)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        # A plain copy: the caller resets `first` while a prefetching iterator still reads from here.
        epoch, first = self.epoch, self.first
        return (self._share(epoch, first + step * self.global_batch) for step in range(self.count(first)))

    def _share(self, epoch: int, position: int) -> tuple[int, int, int]:
        size = min(self.global_batch, self.total - position)
        begin = position + size * self.rank // self.world_size
        end = position + size * (self.rank + 1) // self.world_size
        return epoch, begin, end


class _Fetch(torch.utils.data.Dataset):
    """Maps what `_Steps` yields to batches."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __getitem__(self, step: tuple[int, int, int]) -> Batch:
        return self.rows.fetch(*step)
