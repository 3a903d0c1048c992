"""The training loop."""

from __future__ import annotations

import itertools
import logging
import math
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys_norm.data.batch import Batch
from recsys_norm.models.flops import ModelFlops
from recsys_norm.training import profile
from recsys_norm.training.averaging import WeightAverage
from recsys_norm.training.checkpoint import Checkpoints
from recsys_norm.training.compiling import Replays, begin_step, compile_regions, evaluated_eagerly, fill_tokens
from recsys_norm.training.config import Config, ConfigError
from recsys_norm.training.logging import RunLogger
from recsys_norm.training.masters import MasterWeights
from recsys_norm.training.metrics import Evaluation, TrainingWindow
from recsys_norm.training.optim import Optimizers
from recsys_norm.training.padding import padded
from recsys_norm.training.pipeline import Prepared, SparsePipeline, can_pipeline
from recsys_norm.training.prefetch import DeviceBatches
from recsys_norm.training.replicas import Replicas, local
from recsys_norm.training.runtime import RunError, Runtime, Stopped, kept_rng, rng_state, set_rng_state

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is; saved with every checkpoint. Steps count optimizer steps from 0."""

    step: int = 0
    batches: int = 0  # of each rank
    validated: int = -1  # step of the last validation
    best_step: int | None = None
    best_value: float | None = None
    stale: int = 0  # validations since the best one
    finished: bool = False  # by early stopping
    world_size: int = 1


class Trainer:
    """Trains `model` (its `sparse` part sharded, see `sharding`) on `data`.

    `fit` trains, validates, saves and may stop; `test` evaluates the best checkpoint; `measure_norm_cost` times steps
    with and without norms. `timer`, `recorder` and `peak_mem_bytes` hold what was measured on the way.
    """

    def __init__(self, config: Config, runtime: Runtime, run_dir: Path, data: Any, model: nn.Module) -> None:
        self.config = config
        self.runtime = runtime
        self.data = data
        self.schema = data.schema
        self.dense = model.dense  # the module itself, whatever wraps it in the model
        self.loader = self._train_loader()
        self.total_steps = self._count_steps()
        self.model = model
        self.sparse = model.sparse
        weights = None
        sharded = runtime.size > 1 and config.distributed.dense == "fsdp2"  # which has fp32 shards to gather from
        if runtime.dtype != torch.float32 and config.trainer.grad_accumulation == 1 and not sharded:  # sums in fp32
            weights = MasterWeights(model.dense, runtime.dtype, model.dense.full_precision)
        self.replays: Replays | None = None
        if config.backend.compile:
            backend, cuda = config.backend, runtime.device.type == "cuda"
            replay = backend.cuda_graphs and cuda and config.trainer.grad_accumulation == 1
            if replay:
                fill_tokens(model.dense, config.model, backend.token_multiple)
                self.replays = Replays(model.dense)
            compile_regions(model.dense, replay=replay)
        self.replicas = Replicas(model.dense, config.distributed, runtime, compiled=config.backend.compile)
        model.dense = self.replicas.module
        self.pipeline: SparsePipeline | None = None
        # One GPU has no ids to exchange, but the same code waits for the device twice a step unless it runs ahead.
        ahead = config.distributed.mode == "torchrec" or runtime.device.type == "cuda"
        if ahead and config.distributed.pipeline and can_pipeline(model.sparse):
            self.pipeline = SparsePipeline(model.sparse, runtime.device, self._pipelined_forward)
        self.optimizers = Optimizers(self.dense, self.sparse, config.optimizer, self.total_steps, weights)
        decay = config.trainer.ema_decay
        self.average = None if decay is None else WeightAverage(self.optimizers, decay)
        self.progress = Progress(world_size=runtime.size)
        self.checkpoints = Checkpoints(run_dir, runtime, keep_last=config.trainer.keep_last)
        self.logger = RunLogger(config.logger, run_dir, active=runtime.main)
        self.timer = profile.StepTimer(runtime.device, config.trainer.timing_warmup)
        self.window = TrainingWindow(runtime, self.schema.logit_shift)
        trace = run_dir / "trace.json" if config.trainer.profile_trace else None
        first, recorded = config.trainer.timing_warmup, config.trainer.profile_steps
        self.recorder = profile.StepRecorder(runtime.device, first, recorded, trace, write=runtime.main)
        self.peak_mem_bytes = 0
        self._run_dir = run_dir
        self._full_batch = {True: 0, False: 0}  # most rows of a batch so far, in training and in evaluation
        self._losses: list[tuple[Tensor, Tensor]] = []  # loss and gradient norm of each step since the last check
        self._data_state: dict[str, Any] | None = None
        self._best_before: tuple[int | None, float | None] = None, None  # the best validation but one
        self._stream: Iterator[Batch] | None = None
        self._steps_here = 0

    def close(self) -> None:
        """Let go of the iterators over batches. Collected as garbage, together with their queues, they could not tell the
        loader's processes to end, and each of these would be waited for in vain."""
        self.logger.close()
        self.pipeline = self._stream = None

    # -- the plan of a run

    def _train_loader(self) -> Any:
        return self.data.train_loader(
            rank=self.runtime.rank, world_size=self.runtime.size, seed=self.config.trainer.seed
        )

    def _count_steps(self) -> int:
        settings = self.config.trainer
        self.batches_per_epoch = settings.overfit_batches or len(self.loader)
        if self.batches_per_epoch == 0:
            raise ConfigError("data: the training split has no rows")
        batches = math.ceil(settings.max_epochs * self.batches_per_epoch)
        steps = math.ceil(batches / settings.grad_accumulation)
        return steps if settings.max_steps is None else min(steps, settings.max_steps)

    def _due(self, every_steps: int | None, every_epochs: float | None = None, step: int | None = None) -> bool:
        """Whether something that happens so often happens after that step (None: the one that was just made)."""
        step = self.progress.step if step is None else step
        if every_steps is not None:
            return step % every_steps == 0
        if every_epochs is None:
            return False
        every = every_epochs * self.batches_per_epoch / self.config.trainer.grad_accumulation
        return math.floor(step / every) > math.floor((step - 1) / every)

    @property
    def _over(self) -> bool:
        return self.progress.finished or self.progress.step >= self.total_steps

    def _validation_due(self) -> bool:
        settings = self.config.trainer
        if self.progress.validated == self.progress.step or self.progress.step == 0:
            return False
        return self._over or self._due(settings.eval_every_steps, settings.eval_every_epochs)

    # -- the loop

    def fit(self) -> None:
        """Train up to the last step, or until a signal.

        Raises:
            Stopped: after a signal, with a checkpoint of the last whole step on disk.
            RunError: if a loss or gradient is not finite.
        """
        batches = self._batches()
        self.model.train()
        self._reset_peak()
        while True:
            if self._stop_requested():
                self._save()
                log.info(f"stopped at step {self.progress.step}; continue with trainer.resume={self._run_dir}")
                raise self._stopped()
            if self._validation_due():
                if not self._validate():
                    continue  # a signal came meanwhile
                self._save()
            if self._over:
                return
            self.recorder.before(self._steps_here)
            self._step(batches)
            self.recorder.after(self._steps_here, last=self._over)
            self._report()
            if self._due(self.config.trainer.checkpoint_every_steps) and not self._validation_due():
                self._save()

    def take_steps(self, count: int) -> list[float]:
        """The losses of `count` more steps, the mean over ranks; no validation, no checkpoint. For measurements."""
        if self._stream is None:
            self._stream = self._batches()
            self.model.train()
        for _ in range(count):
            self._step(self._stream)
        return self._write_losses()

    def _batches(self) -> Iterator[Batch]:
        """Batches on the device, epoch after epoch."""
        device, count = self.runtime.device, self.config.trainer.overfit_batches
        if count is not None:
            first = []
            for batch in DeviceBatches(self.loader, device):
                first.append(batch)
                if len(first) == count:
                    break
            while True:
                yield from first
        while True:
            source = DeviceBatches(self.loader, device)
            for batch in source:
                self._data_state = source.state
                yield batch

    def _step(self, batches: Iterator[Batch]) -> None:
        accumulation = self.config.trainer.grad_accumulation
        self.timer.begin()
        self.optimizers.set_lr(self.progress.step)
        loss, rows, tokens, settled = torch.zeros((), device=self.runtime.device), 0, 0, True
        for part in range(accumulation):
            part_loss, batch = self._part(batches, last=part == accumulation - 1)
            loss += part_loss
            events = {name: len(ages) for name, ages in batch.ages.items()}
            rows, tokens = rows + len(batch), tokens + sum(events.values())
            if self.replays is not None:
                settled &= self.replays.count(events)
            self.progress.batches += 1
        own_norm, norm = self.replicas.own_norm(), self.optimizers.clip()
        self.optimizers.step()
        if self.average is not None:
            self.average.update(self.progress.step)
        self.timer.mark("optimizer")
        self.progress.step += 1
        self._steps_here += 1
        self.timer.end(rows, tokens, count=settled and not self.recorder.active)
        self._losses.append((loss, norm.detach() if own_norm is None else own_norm))
        if self.runtime.device.type == "cpu" and self.runtime.size == 1:
            self._check_finite(self._losses[-1:])

    def _part(self, batches: Iterator[Batch], *, last: bool) -> tuple[Tensor, Batch]:
        """Add the gradients of the next batch. Returns this rank's share of the step's loss, and the batch."""
        if self.pipeline is None:
            batch = self._next(batches)
            self.timer.mark("data")
            return self._forward_backward(batch, last=last), batch
        if self.pipeline.idle:
            count = self._steps_to_boundary() * self.config.trainer.grad_accumulation
            self.pipeline.begin(self._prepared(batches, count))
        with nullcontext() if last else self.replicas.accumulate():
            loss, logits, prepared = self.pipeline.progress()
            self.optimizers.after_backward()
        self.timer.mark("backward")
        self._data_state = prepared.state
        self.window.add(logits, prepared.batch)
        return loss, prepared.batch

    def _next(self, batches: Iterator[Batch]) -> Batch:
        step = self.progress.step
        self.runtime.health.at(f"step {step}, waiting for its data")
        batch = next(batches)
        self.runtime.health.at(f"step {step}")
        return batch

    def _steps_to_boundary(self) -> int:
        """Steps up to the next one after which the model is evaluated or saved, which the pipeline must not overrun."""
        settings, first = self.config.trainer, self.progress.step + 1
        for step in range(first, self.total_steps):
            if self._due(settings.checkpoint_every_steps, step=step):
                return step - first + 1
            if self._due(settings.eval_every_steps, settings.eval_every_epochs, step=step):
                return step - first + 1
        return self.total_steps - first + 1

    def _prepared(self, batches: Iterator[Batch], count: int) -> Iterator[Prepared]:
        for _ in range(count):
            batch = self._next(batches)
            rows = self._rows(batch)
            yield Prepared(batch, self._padded(batch, rows), rows, self._data_state)

    def _pipelined_forward(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        self.timer.mark("data")
        logits = self._model_logits(prepared.padded)[: len(prepared.batch)]
        loss = self._loss(logits, prepared.batch, prepared.rows) / self.config.trainer.grad_accumulation
        self.timer.mark("forward")
        return loss, logits

    def _forward_backward(self, batch: Batch, *, last: bool) -> Tensor:
        """Add the gradients of one batch. Returns this rank's share of the step's loss, whose mean over ranks it is."""
        with nullcontext() if last else self.replicas.accumulate():
            rows = self._rows(batch)
            logits = self._logits(batch, rows)
            loss = self._loss(logits, batch, rows) / self.config.trainer.grad_accumulation
            self.timer.mark("forward")
            loss.backward()
            self.optimizers.after_backward()
        self.timer.mark("backward")
        self.window.add(logits, batch)
        return loss.detach()

    def _rows(self, batch: Batch) -> list[int]:
        """Rows of this batch on every rank."""
        if self.runtime.size == 1:
            return [len(batch)]
        return self.runtime.sum(len(batch) * _one_hot(self.runtime.rank, self.runtime.size)).tolist()

    def _logits(self, batch: Batch, rows: list[int]) -> Tensor:
        return self._model_logits(self._padded(batch, rows))[: len(batch)]

    def _padded(self, batch: Batch, rows: list[int]) -> Batch:
        size = max(rows)  # TorchRec wants the same number of rows on every rank
        if self.config.backend.compile:  # and a compiled graph the same in every batch
            size = self._full_batch[self.model.training] = max(size, self._full_batch[self.model.training])
        return padded(batch, size, self.schema)

    def _model_logits(self, batch: Batch) -> Tensor:
        device, dtype = self.runtime.device.type, self.runtime.dtype
        low = dtype != torch.float32
        begin_step()
        with torch.autocast(device, dtype=dtype) if low else nullcontext():
            return self.model(batch).clone()  # what a replayed region returned is overwritten in the next step

    def _loss(self, logits: Tensor, batch: Batch, rows: list[int]) -> Tensor:
        """Sum over tasks of the mean of weight * BCE over all ranks' rows. Gradients are averaged over ranks, which may
        hold different numbers of rows: each divides its sum by the mean number."""
        if self.schema.logit_shift:  # negatives were left out, and the model's own logits are to be those of all rows
            logits = torch.cat([logits[:, :1] + self.schema.logit_shift, logits[:, 1:]], 1)
        losses = F.binary_cross_entropy_with_logits(logits, batch.label, reduction="none").sum(1)
        if batch.weight is not None:
            losses = losses * batch.weight
        return losses.sum() * (len(rows) / max(sum(rows), 1))

    def _stop_requested(self) -> bool:
        """Whether any rank got a signal; asked by all ranks at the same points."""
        return bool(self.runtime.sum(torch.tensor(len(self.runtime.signals))))

    def _stopped(self) -> Stopped:
        return Stopped(self.runtime.signals[0] if self.runtime.signals else signal.SIGTERM)

    # -- reports and guards

    def _report(self) -> None:
        """After each step."""
        if self._due(self.config.logger.every_steps) or self._over:
            self._write_losses()
        else:
            self.logger.progress(self.progress.step, self.total_steps)

    def _write_losses(self) -> list[float]:
        """Check and log the steps since the last call, if there are any. Returns their losses."""
        taken, self._losses = self._losses, []
        if not taken:
            return []
        self._check_finite(taken)
        local = torch.stack([loss for loss, _ in taken]).double().cpu()
        losses = (self.runtime.sum(local) / self.runtime.size).tolist()
        values = {"loss": sum(losses) / len(losses), **self.window.compute(), "lr": self.optimizers.lr}
        times = self.timer.times()
        recent = times.step_ms[-len(losses) :]
        if recent:
            values["step_ms"] = sum(recent) / len(recent)
            values["examples_per_s"] = self.runtime.size * sum(times.rows[-len(recent) :]) / sum(recent) * 1e3
        step = self.progress.step
        self.logger.progress(step, self.total_steps, values)
        self.logger.metrics(step, "train", {**values, "step_loss": losses}, self.total_steps)
        return losses

    def _check_finite(self, steps: list[tuple[Tensor, Tensor]]) -> None:
        """Raise for the first step whose loss or gradient norm is not a finite number."""
        if not steps:
            return
        values = torch.stack([torch.stack([loss.float(), norm.float()]) for loss, norm in steps]).cpu()
        bad = ~torch.isfinite(values)
        counts = self.runtime.sum(bad.long())  # over ranks
        if not bool(counts.any()):
            return
        index = int(counts.any(1).nonzero()[0])
        what = "the loss" if bool(counts[index, 0]) else "the norm of the gradients"
        column = 0 if what == "the loss" else 1
        each = torch.zeros(self.runtime.size)
        each[self.runtime.rank] = values[index, column]
        each = self.runtime.sum(each)  # every rank adds to an entry of its own
        ranks = (~torch.isfinite(each)).nonzero().flatten().tolist()
        value, named = float(each[ranks[0]]), ", ".join(map(str, ranks))
        where = f" on rank {named}" if self.runtime.size > 1 else ""
        step = self.progress.step - len(steps) + index
        batch = step * self.config.trainer.grad_accumulation
        saved = self.checkpoints.steps() if self.config.trainer.checkpoint else []
        kept = f"; the last good checkpoint is of step {saved[-1]}" if saved else ""
        raise RunError(
            f"{what} is {value} at step {step} (epoch {batch // self.batches_per_epoch}, "
            f"batch {batch % self.batches_per_epoch}){where}{kept}; check the data, or lower optimizer.dense.lr and "
            "optimizer.sparse.lr, or raise optimizer.warmup_steps"
        )

    # -- validation, test, checkpoints

    def _validate(self) -> bool:
        """Validate and note whether it is the best so far. False if a signal came meanwhile (nothing is noted then)."""
        self._check_finite(self._losses)
        metrics = self.evaluate("validation", self.config.trainer.eval_batches)
        if metrics is None:
            return False
        progress, settings = self.progress, self.config.trainer
        progress.validated = progress.step
        self.logger.metrics(progress.step, "validation", metrics, self.total_steps)
        value = metrics[settings.monitor]
        if value is None:
            raise ConfigError(f"trainer.monitor: {settings.monitor!r} cannot be computed on this data; use loss")
        sign = 1 if settings.monitor in ("auc", "gauc") else -1
        if not math.isnan(value) and (progress.best_value is None or sign * value > sign * progress.best_value):
            self._best_before = progress.best_step, progress.best_value
            progress.best_step, progress.best_value, progress.stale = progress.step, value, 0
        else:
            progress.stale += 1
        if settings.patience is not None and progress.stale >= settings.patience and not self._over:
            progress.finished = True
            log.info(
                f"stopping early at step {progress.step}: no better {settings.monitor} than {progress.best_value} "
                f"(step {progress.best_step}) in {progress.stale} validations"
            )
        return True

    def evaluate(self, split: str, limit: int | None = None) -> dict[str, Any] | None:
        """Metrics of the split over all ranks. None if a signal came meanwhile."""
        self._note_peak()
        runtime = self.runtime
        evaluation = Evaluation(self.schema.tasks, self.schema.base_rate, runtime)
        loader = self.data.eval_loader(split, rank=runtime.rank, world_size=runtime.size)
        self.model.eval()
        try:
            average = self.average.applied() if self.average is not None else nullcontext()
            with average, torch.no_grad(), kept_rng(), evaluated_eagerly(not self.config.backend.compile_eval):
                for index, batch in enumerate(DeviceBatches(loader, runtime.device)):
                    if limit is not None and index >= limit:
                        break
                    runtime.health.at(f"{split} batch {index}")
                    if self._stop_requested():
                        return None
                    evaluation.add(self._logits(batch, self._rows(batch)), batch)
                return evaluation.compute()
        finally:
            self.model.train()
            self._reset_peak()

    def test(self) -> dict[str, Any] | None:
        """Metrics of the best checkpoint on the test split; of the current weights where nothing was saved."""
        best = self.progress.best_step
        if self.config.trainer.checkpoint and best is not None and best != self.progress.step:
            self.checkpoints.load(best, self.tensors(optimizer=False))
            self.optimizers.loaded()
        metrics = self.evaluate("test", self.config.trainer.test_batches)
        if metrics is None:
            raise self._stopped()
        self.logger.metrics(self.progress.step, "test", metrics, self.total_steps)
        return metrics

    def tensors(self, *, optimizer: bool = True) -> dict[str, Any]:
        """What a checkpoint holds, by name; loading fills these very tensors."""
        tensors = {f"dense/{name}": value for name, value in self.dense.state_dict().items()}
        tensors |= {f"sparse/{name}": value for name, value in self.sparse.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average/{name}": value for name, value in self.average.values.items()}
        if optimizer:
            tensors |= {f"optimizer/{name}": value for name, value in self.optimizers.state().items()}
        return tensors

    def _save(self) -> None:
        if not self.config.trainer.checkpoint:
            return
        self.runtime.health.at(f"the checkpoint of step {self.progress.step}")
        self._write_losses()  # nothing is saved after a step that went wrong, and a resumed run has the whole curve
        local = {"rng": rng_state(), "data": self._data_state}
        progress = self.progress
        saved = self.checkpoints.save(progress.step, self.tensors(), asdict(progress), local, progress.best_step)
        if not saved and progress.best_step == progress.step:  # the best one that is on disk
            progress.best_step, progress.best_value = self._best_before

    def resume(self, run_dir: Path) -> None:
        """Continue from the newest complete checkpoint of `run_dir`."""
        source = Checkpoints(run_dir, self.runtime)
        steps = self.runtime.broadcast(source.steps())
        if not steps:
            raise ConfigError(f"trainer.resume: {str(run_dir)!r} holds no complete checkpoint")
        step = steps[-1]
        self.progress = Progress(**source.progress(step))
        self.checkpoints.adopt(source, step, self.progress.best_step)
        self.checkpoints.load(step, self.tensors())
        self.optimizers.loaded()
        same_ranks = self.progress.world_size == self.runtime.size
        self.progress.world_size = self.runtime.size
        local = self.checkpoints.local(step, self.runtime.rank if same_ranks else 0)
        if local["data"] is not None and self.config.trainer.overfit_batches is None:
            self.loader.load_state_dict(local["data"])
            self._data_state = local["data"]
        if same_ranks:
            set_rng_state(local["rng"])
        self.logger.continue_from(run_dir, step)
        log.info(f"resuming from step {step} of {run_dir}")

    # -- measurements

    def _reset_peak(self) -> None:
        if self.runtime.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.runtime.device)

    def _note_peak(self) -> None:
        if self.runtime.device.type == "cuda":
            self.peak_mem_bytes = max(self.peak_mem_bytes, torch.cuda.max_memory_allocated(self.runtime.device))

    def static_bytes(self) -> int:
        """Parameters, tables and the state of both optimizers on this rank."""
        total = 0
        for value in self.tensors().values():
            total += sum(part.numel() * part.element_size() for part in local(value))
        if self.optimizers.weights is not None:  # low-precision weights and gradients
            total += self.optimizers.weights.nbytes
        return total

    def flops_per_step(self, batches: int = 4) -> float:
        """GEMM and attention flops of a step over valid tokens on this rank: the mean of the first training batches."""
        model = ModelFlops(self.config.model, self.schema)
        counts = []
        for batch in itertools.islice(self._train_loader(), batches):
            lengths = {event.name: batch.ids[event.fields[0].name].lengths() for event in self.schema.events}
            counts.append(model.step(len(batch), lengths))
        return sum(counts) / max(len(counts), 1) * self.config.trainer.grad_accumulation

    def measure_norm_cost(self) -> float:
        """1 - median time of a step with every norm replaced by the identity / median time of a step. Call it last: the
        learning rates are 0, but the optimizers' statistics move.

        With DDP both kinds of steps leave out the exchange of gradients, which waits for those of the norms' weights.
        """
        from recsys_norm.ops import norms_as_identity

        batches = self._batches()
        first = [next(batches) for _ in range(4)]
        self.optimizers.freeze()
        turn = {"with": 0, "without": 0}
        exchange = self.runtime.size == 1 or self.config.distributed.dense != "ddp"

        def step(name: str) -> None:
            batch = first[turn[name] % len(first)]
            turn[name] += 1
            with norms_as_identity() if name == "without" else nullcontext():
                self._forward_backward(batch, last=exchange)
            self.optimizers.clip()
            self.optimizers.step()

        variants = {name: lambda name=name: step(name) for name in turn}
        times = profile.alternate(variants, self.config.trainer.norm_cost_steps, self.runtime.device)
        return profile.norm_cost(times)


def _one_hot(index: int, size: int) -> Tensor:
    return F.one_hot(torch.tensor(index), size)
