"""TorchRec's TrainPipelineSparseDist inside the trainer's loop: while one batch is computed, the ids of the next one
travel to the ranks that hold their rows, and the one after that is copied to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recsys_norm.data.batch import Batch


@dataclass
class Prepared:
    """A batch on the device and what goes with it until it is computed.

    padded: what the model gets, with equally many rows on every rank. rows: the rows of `batch` on every rank. state:
    the loader's state after it; the loader itself is ahead.
    """

    batch: Batch
    padded: Batch
    rows: list[int]
    state: Any


class SparsePipeline:
    """Forward and backward of prepared batches, one per `progress`.

    It replaces the forward of the sharded tables, so it works in stretches: `begin` one with the batches up to
    the next evaluation or checkpoint; after its last batch the model is as it was before.

    Args:
        sparse: the DistributedModelParallel.
        forward: loss (a scalar to differentiate) and logits of a prepared batch, through the whole model.
    """

    def __init__(
        self, sparse: nn.Module, device: torch.device, forward: Callable[[Prepared], tuple[Tensor, Tensor]]
    ) -> None:
        self._sparse = sparse
        self._device = device
        self._forward = forward
        self._ahead: deque[Prepared] = deque()
        self._source: Iterator[Batch] | None = None
        self._pipeline = None

    @property
    def idle(self) -> bool:
        return self._source is None

    def begin(self, batches: Iterator[Prepared]) -> None:
        """A stretch of at least one batch; `batches` ends with it."""
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        self._source = self._noted(batches)
        self._pipeline = TrainPipelineSparseDist(
            self._sparse, _NoOptimizer(), self._device, execute_all_batches=True, custom_model_fwd=self._compute
        )

    def progress(self) -> tuple[Tensor, Tensor, Prepared]:
        """Loss and logits of the next batch, whose gradients were added and whose tables were updated."""
        loss, logits, prepared = self._pipeline.progress(self._source)
        if not self._ahead:
            self._pipeline.detach()
            self._pipeline = self._source = None
        return loss, logits, prepared

    def _noted(self, batches: Iterator[Prepared]) -> Iterator[Batch]:
        for prepared in batches:
            self._ahead.append(prepared)
            yield prepared.padded

    def _compute(self, padded: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Prepared]]:
        prepared = self._ahead.popleft()
        prepared.padded = padded
        if self._device.type == "cuda":  # the stream that copied it is not the one that computes
            prepared.batch.record_stream(torch.cuda.current_stream(self._device))
        loss, logits = self._forward(prepared)
        return loss, (loss.detach(), logits.detach(), prepared)


class _NoOptimizer:
    """The trainer clips and steps itself, possibly after several batches."""

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass


def can_pipeline(sparse: nn.Module) -> bool:
    """TorchRec cannot pipeline a model whose tables are all replicated: nothing of it is exchanged."""
    return any(hasattr(table, "local_shards") for table in sparse.state_dict().values())
