"""One run, from a checked configuration to its summary."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from recsys_norm import env
from recsys_norm.ops import registry
from recsys_norm.training import fairness, profile, runtime, summary
from recsys_norm.training import logging as run_logging
from recsys_norm.training.compiling import CompileClock
from recsys_norm.training.config import Config, ConfigError
from recsys_norm.training.kernel_clock import KernelClock
from recsys_norm.training.prefetch import worker_failure
from recsys_norm.training.runtime import RunError, Runtime
from recsys_norm.training.sharding import describe, shard
from recsys_norm.training.trainer import Trainer

log = logging.getLogger(__name__)

LISTED_KERNELS = 60  # in the summary: those that take most of a step
_QUALITY = ("loss", "ne", "auc", "gauc", "calibration", "gauc_users", "gauc_skipped")


def run(config: Config, run_dir: Path) -> dict[str, Any]:
    """Train, test, and write summary.json into `run_dir`. Returns the summary."""
    config = _restarted(config, run_dir)
    with runtime.start(config, _job_number()) as processes, run_logging.warnings_as_lines(processes.main):
        _claim(run_dir, config, processes)
        registry.reset_counts()
        torch.compiler.reset()
        with CompileClock() as clock, KernelClock(processes.device, clock) as kernels:
            trainer = build(config, processes, run_dir)
            try:
                return _run(config, processes, run_dir, trainer, (clock, kernels))
            except Exception as error:
                if (reason := worker_failure(error)) is None:
                    raise
                raise RunError(reason) from error
            finally:
                # Else this rank, done waiting for another, might look like the hanging one.
                processes.health.at("cleaning up")
                trainer.close()
                del trainer
                gc.collect()  # a sweep's next job finds the memory free
                if processes.device.type == "cuda":
                    torch.cuda.empty_cache()


def _run(
    config: Config, processes: Runtime, run_dir: Path, trainer: Trainer, clocks: tuple[CompileClock, KernelClock]
) -> dict[str, Any]:
    log.info(f"run directory {run_dir}")
    _log_facts(trainer, run_dir)
    _keep_data_facts(trainer.data, processes, run_dir, config.trainer.resume)
    if config.trainer.resume is not None:
        trainer.resume(Path(config.trainer.resume))
    start = fairness.Start(processes, trainer.schema, config.trainer.seed, config.trainer.row_order)
    if config.trainer.resume is None:
        start.weights(trainer.tensors(optimizer=False))
    trainer.loader = start.watch(trainer.loader)
    trainer.fit()
    techniques, fallbacks = registry.counts(), registry.fallbacks()
    compile_s, tune_s = (clock.seconds for clock in clocks)
    metrics = trainer.test() if config.trainer.test else {}
    trainer.logger.close()
    result = {
        **_identity(config, processes),
        **_speed(trainer),
        **_memory(trainer),
        "norm_cost": None,
        **{name: metrics.get(name) for name in _QUALITY},
        "split": "test",
        "bayes_auc": trainer.schema.bayes_auc,
        "best_step": trainer.progress.best_step,
        "techniques": techniques,
        "fallbacks": fallbacks,
        "compile_s": compile_s,
        "tune_s": tune_s,
        "start": start.record(),
        "env": env.record(),
    }
    if config.trainer.measure_norm_cost:
        if processes.main:
            summary.write(run_dir, result)  # what is known stays, should the next part be cut off
        result["norm_cost"] = trainer.measure_norm_cost()
    if processes.main:
        path = summary.write(run_dir, result)
        log.info("done\n" + summary.table(result, path))
    return run_logging.finite(result)


def build(config: Config, processes: Runtime, run_dir: Path) -> Trainer:
    """Data, model and trainer of a run."""
    from recsys_norm.models.kunlun import Kunlun

    settings = config.trainer
    if config.backend.compile is None:
        config.backend.compile = processes.device.type == "cuda"
    runtime.seed_everything(settings.seed)
    with processes.health.unlimited("reading the data"):
        data = instantiate_data(config.data)
    model = Kunlun(
        config.model,
        data.schema,
        backend=config.backend.name,
        attention=config.attention,
        on_unsupported=settings.on_unsupported,
        table_device="meta",
    )
    model.dense.to(processes.device)
    model.sparse = shard(
        model.sparse,
        config.optimizer.sparse,
        config.distributed,
        processes,
        batch_size=config.model.batch_size,
        seed=settings.seed,
    )
    trainer = Trainer(config, processes, run_dir, data, model)
    runtime.seed_everything(settings.seed + processes.rank)  # ranks drop out different units
    return trainer


def instantiate_data(config: Any) -> Any:
    """The data module of a config node with `_target_`. What is wrong with the data is said in one line."""
    try:
        return instantiate(config)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, (ValueError, OSError)):
            raise ConfigError(f"data: {cause}") from error
        raise


def _keep_data_facts(data: Any, processes: Runtime, run_dir: Path, resume: str | None) -> None:
    """What the data module fitted (vocabularies, statistics) is kept with the run, in `data`."""
    problem = None
    if processes.main and hasattr(data, "save"):
        try:
            if resume is not None and (Path(resume) / "data").is_dir():
                data.save(Path(resume) / "data")  # compares
            data.save(run_dir / "data")
        except (ValueError, OSError) as error:
            problem = str(error)
    if problem := processes.broadcast(problem):
        raise ConfigError(f"data: {problem}")


def _restarted(config: Config, run_dir: Path) -> Config:
    """torchrun restarts all processes after one died: the run then resumes itself."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if restarted and any((run_dir / "checkpoints").glob("step-*")):
        config.trainer.resume = str(run_dir)
    return config


def _claim(run_dir: Path, config: Config, processes: Runtime) -> None:
    """Start metrics.jsonl. A directory belongs to one run, or to those that continue it."""
    taken = False
    if processes.main:
        path = run_dir / "metrics.jsonl"
        resumed = config.trainer.resume is not None and Path(config.trainer.resume).resolve() == run_dir.resolve()
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            path.open("r+" if resumed or restarted else "x").close()
        except FileExistsError:
            taken = True
        except FileNotFoundError:
            path.open("x").close()
    if processes.broadcast(taken):
        raise ConfigError(
            f"hydra.run.dir: {str(run_dir)!r} already holds a run; choose another directory, "
            "or continue that run with trainer.resume"
        )


def _job_number() -> int:
    job = HydraConfig.get().job if HydraConfig.initialized() else {}
    return int(job.get("num", None) or 0)


def _log_facts(trainer: Trainer, run_dir: Path) -> None:
    facts = {**trainer.data.describe(), "steps": trainer.total_steps}
    dense = sum(p.numel() for p in trainer.dense.parameters())
    tables = sum(table.size().numel() for table in trainer.sparse.state_dict().values())
    log.info("data: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    log.info(f"model: {dense:,} dense parameters, {tables:,} in tables")
    _record_plan(trainer, run_dir)


def _record_plan(trainer: Trainer, run_dir: Path) -> None:
    """plan.json: how each table is sharded, and how much of it each rank holds."""
    if trainer.config.distributed.mode == "single":
        return
    plan = describe(trainer.sparse, trainer.runtime)
    if trainer.runtime.main:
        (run_dir / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")
    sizes = [sum(table["bytes_per_rank"][rank] for table in plan.values()) for rank in range(trainer.runtime.size)]
    kinds = Counter(table["sharding"] for table in plan.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    log.info(f"tables: {counts}; bytes per rank {', '.join(f'{size:,}' for size in sizes)}")


def _identity(config: Config, processes: Runtime) -> dict[str, Any]:
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    settings = config.trainer
    return {
        "backend": config.backend.name,
        "compile": config.backend.compile,
        "attention": config.attention,
        "model": choices.get("model", config.model.name),
        "data": choices.get("data", str(config.data.get("_target_", "")).rpartition(".")[2].lower()),
        "device": processes.device.type,
        "world_size": processes.size,
        "dtype": str(processes.dtype).removeprefix("torch."),
        "batch": config.data.batch_size * processes.size * settings.grad_accumulation,
        "seed": settings.seed,
    }


def _speed(trainer: Trainer) -> dict[str, Any]:
    times, size = trainer.timer.times(), trainer.runtime.size
    step_ms, kernels = times.percentiles(), trainer.recorder.kernels
    examples, tokens = times.per_second(times.rows), times.per_second(times.tokens)
    mfu = None
    peak = profile.peak_flops(torch.cuda.get_device_name()) if trainer.runtime.device.type == "cuda" else None
    if peak is not None and times.step_ms:
        mfu = trainer.flops_per_step() / (peak * sum(times.step_ms) / len(times.step_ms) / 1e3)
    return {
        "steps": trainer.progress.step,
        "measured_steps": len(times.step_ms),
        "examples_per_s": None if examples is None else examples * size,
        "tokens_per_s": None if tokens is None else tokens * size,
        "step_ms": step_ms,
        "phase_ms": times.phases(),
        "norm_share": kernels.norm_share if kernels else None,
        "kernel_ms": dict(list(kernels.kernel_ms.items())[:LISTED_KERNELS]) if kernels else None,
        "busy": kernels.busy if kernels else None,
        "mfu": mfu,
    }


def _memory(trainer: Trainer) -> dict[str, Any]:
    peak = trainer.peak_mem_bytes or None  # None on CPU
    return {
        "peak_mem_bytes": peak,
        "activation_mem_bytes": None if peak is None else peak - trainer.static_bytes(),
    }
