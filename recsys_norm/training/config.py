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

    compile: put torch.compile around the dense part of the model (embedding lookups stay outside).
    """

    name: str = MISSING
    compile: bool = False

    def __post_init__(self) -> None:
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
    eval_every_steps: int | None = None
    eval_every_epochs: float | None = 1.0
    eval_batches: int | None = None  # validate on this many batches only
    monitor: str = "loss"  # loss | ne | auc | gauc
    patience: int | None = None  # stop after this many validations without a better value
    test: bool = True  # evaluate the best checkpoint on the test split at the end
    checkpoint: bool = True
    checkpoint_every_steps: int | None = None  # besides the one after each validation
    keep_last: int = 1
    resume: str | None = None  # a run directory; its newest complete checkpoint is continued
    overfit_batches: int | None = None  # train on the first batches of epoch 0 again and again
    timing_warmup: int = 10  # steps that no timing counts
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
        for key in ("max_steps", "timing_warmup", "profile_steps"):
            _at_least(f"trainer.{key}", getattr(self, key), 0)
        for key in ("threads", "keep_last", "overfit_batches", "norm_cost_steps"):
            _at_least(f"trainer.{key}", getattr(self, key), 1)
        _at_least("trainer.max_epochs", self.max_epochs, 0)
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
    """Row-wise Adagrad over the embedding tables, applied inside the backward pass.

    With `trainer.grad_accumulation` above 1 each batch updates the rows that it touched. `clip_norm` does not reach
    these gradients, they never exist as a whole.
    """

    lr: float = 0.02
    eps: float = 1e-8
    weight_decay: float = 0.0


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
        data_parallel. Empty: any for several processes, table_wise for one.
    tables: the same for single tables, by name.
    timeout_s: a collective that waits longer than this ends the run.
    """

    mode: str = "single"
    sharding: list[str] = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=dict)
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _choice("distributed.mode", self.mode, ("single", "torchrec"))
        _at_least("distributed.timeout_s", self.timeout_s, 1)


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

    def __post_init__(self) -> None:
        _choice("attention", self.attention, ("fused", "eager"))


GROUPS = {
    "backend": BackendConfig,
    "trainer": TrainerConfig,
    "optimizer": OptimizerConfig,
    "logger": LoggerConfig,
    "distributed": DistributedConfig,
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
