"""Structured configs of a run. `register` makes them known to Hydra; the yaml files under `configs/` start from them,
so an unknown key or a wrong type is refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


class ConfigError(ValueError):
    """A setting that cannot work. The message names the key, the value, what is allowed, and the way out."""


def _choice(key: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(allowed)}")


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise ConfigError(f"{key}: {value} is below the smallest allowed value {least}")


@dataclass
class BackendConfig:
    """Which implementation the norm ops use.

    compile: put torch.compile around the dense part of the model (embedding lookups stay outside); null does so on a GPU
        and not on a CPU.
    compile_eval: also in evaluation, whose graphs are others; without, it runs eagerly.
    cuda_graphs: record what is compiled as CUDA graphs, which take the host next to no time to start (not with gradient
        accumulation). Each number of tokens T that occurs is recorded for itself.
    token_multiple: with CUDA graphs, fill T up in steps of this, so that few numbers occur (the model's `batch_size` x
        `mean_len` is half a step below one of them); null: a power of two of about 1/32 of that of the longest events;
        0: leave T and record only what does not depend on it.
    """

    name: str = MISSING
    compile: bool | None = False
    compile_eval: bool = True
    cuda_graphs: bool = True
    token_multiple: int | None = None

    def __post_init__(self) -> None:
        _at_least("backend.token_multiple", self.token_multiple, 0)
        _choice("backend.name", self.name, ("unfused", "compiled", "naive", "fused"))


@dataclass
class TrainerConfig:
    """The course of a run. A step is one optimizer step; it takes `grad_accumulation` batches on every rank.

    Training ends after `max_steps` steps or `max_epochs` epochs, whichever is first. Validation runs every
    `eval_every_steps` steps or `eval_every_epochs` epochs (a fraction is fine), and at the end. The checkpoint with the
    best validation `monitor` and the last `keep_last` are kept.
    """

    max_steps: int | None = None
    max_epochs: float = 1.0
    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda
    precision: str = "auto"  # auto (bf16 on CUDA, fp32 on CPU) | bf16 | fp32
    threads: int | None = None  # CPU threads of PyTorch; None leaves its default
    deterministic: bool = False
    on_unsupported: str = "fallback"  # fallback | raise: what an op does where its backend cannot run
    grad_accumulation: int = 1
    ema_decay: float | None = None  # evaluate, test and keep a moving average of the dense weights; None: no average
    eval_every_steps: int | None = None
    eval_every_epochs: float | None = 1.0
    eval_batches: int | None = None  # validate on this many batches only
    monitor: str = "loss"  # loss | ne | auc | gauc
    patience: int | None = None  # stop after this many validations without a better value
    test: bool = True  # evaluate the best checkpoint on the test split at the end
    test_batches: int | None = None  # on this many batches of it only
    checkpoint: bool = True
    checkpoint_every_steps: int | None = None  # besides the one after each validation
    keep_last: int = 1
    resume: str | None = None  # a run directory; its newest complete checkpoint is continued
    row_order: int = 0  # above 0: the rows of each batch in an order drawn from it: the same sums in another order
    overfit_batches: int | None = None  # train on the first batches of epoch 0 again and again
    timing_warmup: int = 10  # steps that no timing counts; nor does it count steps that record CUDA graphs
    profile_steps: int = 5  # steps under the profiler, for norm_share and the busy fraction; 0: none
    profile_trace: bool = False  # also write trace.json for a trace viewer
    measure_norm_cost: bool = False
    norm_cost_steps: int = 20  # pairs of steps with and without norms

    def __post_init__(self) -> None:
        _choice("trainer.device", self.device, ("auto", "cpu", "cuda"))
        _choice("trainer.precision", self.precision, ("auto", "bf16", "fp32"))
        _choice("trainer.on_unsupported", self.on_unsupported, ("fallback", "raise"))
        _choice("trainer.monitor", self.monitor, ("loss", "ne", "auc", "gauc"))
        for key in ("grad_accumulation", "eval_every_steps", "eval_batches", "patience", "checkpoint_every_steps"):
            _at_least(f"trainer.{key}", getattr(self, key), 1)
        _at_least("trainer.test_batches", self.test_batches, 1)
        for key in ("max_steps", "timing_warmup", "profile_steps", "row_order"):
            _at_least(f"trainer.{key}", getattr(self, key), 0)
        for key in ("threads", "keep_last", "overfit_batches", "norm_cost_steps"):
            _at_least(f"trainer.{key}", getattr(self, key), 1)
        _at_least("trainer.max_epochs", self.max_epochs, 0)
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"trainer.ema_decay: {self.ema_decay} must lie between 0 and 1, or null")
        if self.eval_every_epochs is not None and not self.eval_every_epochs > 0:
            raise ConfigError(f"trainer.eval_every_epochs: {self.eval_every_epochs} must be above 0, or null for none")


@dataclass
class DenseOptimizerConfig:
    """AdamW over everything but the embedding tables; `weight_decay` leaves out vectors (biases and norms)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclass
class SparseOptimizerConfig:
    """Row-wise Adagrad over the embedding tables, applied inside the backward pass. There is no weight decay: fbgemm
    accepts one and ignores it.

    With `trainer.grad_accumulation` above 1 each batch updates the rows that it touched. `clip_norm` does not reach
    these gradients, they never exist as a whole.
    """

    lr: float = 0.02
    eps: float = 1e-8


@dataclass
class OptimizerConfig:
    """Both learning rates rise linearly over `warmup_steps`, then follow `decay` down to `final_lr` of their peak."""

    dense: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    sparse: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    warmup_steps: int = 100
    decay: str = "constant"  # constant | linear | cosine
    final_lr: float = 0.0  # as a fraction of the peak
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        _choice("optimizer.decay", self.decay, ("constant", "linear", "cosine"))
        _at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        _at_least("optimizer.final_lr", self.final_lr, 0)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"optimizer.clip_norm: {self.clip_norm} must be above 0, or null for no clipping")
        for key in ("dense", "sparse"):
            lr = getattr(self, key).lr
            if not (lr >= 0 and math.isfinite(lr)):
                raise ConfigError(f"optimizer.{key}.lr: {lr} must be a finite number that is not negative")


@dataclass
class LoggerConfig:
    """What a run writes while it trains, every `every_steps` steps. metrics.jsonl is always written."""

    every_steps: int = 50
    tensorboard: bool = True
    progress: str = "auto"  # auto (a bar on a terminal, lines elsewhere) | bar | lines | none

    def __post_init__(self) -> None:
        _choice("logger.progress", self.progress, ("auto", "bar", "lines", "none"))
        _at_least("logger.every_steps", self.every_steps, 1)


@dataclass
class DistributedConfig:
    """How a run spreads over processes.

    mode: "single" is one process; "torchrec" takes the processes that torchrun started (one is fine too).
    sharding: sharding types the planner may use for a table: table_wise, row_wise, column_wise, table_row_wise,
        data_parallel (every process holds the whole table). Empty: table_wise, and row_wise for several processes.
    tables: the same for single tables, by name: +distributed.tables.item=[row_wise].
    memory_gb: what one process has for tables and activations; None: what its device, or its share of the machine, has.
    dense: the part of the model that is not a table is replicated ("ddp"), or its parameters, gradients and optimizer
        state are sharded ("fsdp2").
    bucket_mb: the gradients of a "ddp" part are exchanged in buckets of so many MiB. Kernels that keep every multiprocessor
        busy wait for those that an exchange holds, so a few large buckets disturb them less than many small ones; the last
        bucket is exchanged with nothing beside it.
    exchange: the dtype in which embeddings and their gradients travel between ranks. "bf16" halves that and loses nothing
        where a table is on one rank and the activations are bfloat16, too; gloo knows fp16 only and takes that.
    pipeline: sort and exchange the ids of the next batches while this one is computed (TrainPipelineSparseDist), on
        several ranks and on one GPU.
    timeout_s: a process that makes no progress for so long ends the run; a step with its compilation, a batch of a
        validation and a checkpoint have to be faster.
    """

    mode: str = "single"
    sharding: list[str] = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=dict)
    memory_gb: float | None = None
    dense: str = "ddp"
    bucket_mb: float = 100.0
    exchange: str = "fp32"
    pipeline: bool = True
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _choice("distributed.mode", self.mode, ("single", "torchrec"))
        _choice("distributed.dense", self.dense, ("ddp", "fsdp2"))
        if self.memory_gb is not None and not self.memory_gb > 0:
            raise ConfigError(f"distributed.memory_gb: {self.memory_gb} must be above 0, or null for all there is")
        _choice("distributed.exchange", self.exchange, ("fp32", "bf16", "fp16"))
        _at_least("distributed.bucket_mb", self.bucket_mb, 1)
        _at_least("distributed.timeout_s", self.timeout_s, 1)


@dataclass
class CompareConfig:
    """A sweep (`-m`) and its comparison, see `multirun`.

    isolate: run each point in a process of its own, with Hydra's basic launcher.
    rounds: run all points so many times, every second time backwards; medians over the rounds are reported.
    controls: runs of the unfused path (or the first) with the rows of each batch in another order, for each group of
        points that is compared: what the other paths' loss curves are judged by.
    timeout_s: a run that takes longer is stopped and counts as failed; None: no limit.
    """

    isolate: bool = True
    rounds: int = 1
    controls: int = 1
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        _at_least("compare.rounds", self.rounds, 1)
        _at_least("compare.controls", self.controls, 0)
        _at_least("compare.timeout_s", self.timeout_s, 1)


@dataclass
class Config:
    """A whole run. `attention="eager"` takes plain PyTorch attention, to tell its share from that of the norms."""

    backend: BackendConfig = MISSING
    attention: str = "fused"
    model: Any = MISSING
    data: Any = MISSING
    trainer: TrainerConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    logger: LoggerConfig = MISSING
    distributed: DistributedConfig = MISSING
    compare: CompareConfig = MISSING

    def __post_init__(self) -> None:
        _choice("attention", self.attention, ("fused", "eager"))


GROUPS = {
    "backend": BackendConfig,
    "trainer": TrainerConfig,
    "optimizer": OptimizerConfig,
    "logger": LoggerConfig,
    "distributed": DistributedConfig,
    "compare": CompareConfig,
}


def register() -> None:
    """Store every structured config as `<group>/base_<name>` and the root as `base_config`. May be called again."""
    from hydra.core.config_store import ConfigStore

    from recsys_norm.data import config as data_config
    from recsys_norm.models import config as model_config

    store = ConfigStore.instance()
    store.store(name="base_config", node=Config)
    for group, node in GROUPS.items():
        store.store(group=group, name=f"base_{group}", node=node)
    data_config.register(store)
    model_config.register(store)
