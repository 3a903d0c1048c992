"""Weak scaling of training steps over the GPUs of one host, the plan of the tables, and the memory of each rank:

    torchrun --nproc-per-node 2 benchmarks/scaling.py --json benchmarks/scaling_h200.json

For each model and backend, in the same processes: rank 0 trains alone with a batch of B rows and tables of its own, and
all ranks train together with B rows each and sharded tables. Blocks of steps of the two alternate, so that a drifting
clock meets both. efficiency = median step alone / median step of the slowest rank together; with `--strong` also
strong_efficiency, of all ranks with B / ranks rows each. The batches are made before and stay on the device.

Gate: kunlun_tiny in fp32, the same rows on one rank and on all: without equal losses nothing is timed. Each result is
written when it is there; after `--budget` seconds no further case begins.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_BEGAN = time.perf_counter()
GATE_STEPS, GATE_TOLERANCE = 20, 1e-4


def composed(overrides: list[str]) -> Any:
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from recsys_norm.training import main

    main.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("recsys_norm.configs", version_base="1.3"):
        return main.checked(compose("config", overrides=overrides))


def case_overrides(args: argparse.Namespace, model: str, backend: str) -> list[str]:
    """A run without end on `--batches` batches, with tables of `--table-gb`."""
    plain = composed([f"model={model}", *args.set])
    tables = plain.model.tables
    rows = -(-int(args.table_gb * 1e9) // ((tables.count + 1) * tables.dim * 4))  # the items' table is as large
    return [
        f"model={model}",
        f"backend={backend}",
        "data=synthetic",
        "data.vocabulary=null",
        f"data.pool={args.batches}",
        "data.bayes_rows=64",
        "data.num_workers=0",
        "distributed=torchrec",
        f"model.tables.rows={rows}",
        f"trainer.overfit_batches={args.batches}",
        "trainer.max_epochs=100000",
        "trainer.checkpoint=false",
        "trainer.eval_every_epochs=null",
        "logger=quiet",
        "logger.tensorboard=false",
        *args.set,
    ]


class Case:
    """One model and backend: a trainer for each way to spread it. "alone" is rank 0's; "together" and "strong" take all
    ranks, with B rows and with B / ranks rows on each."""

    def __init__(self, overrides: dict[str, list[str]], processes: Any, alone: Any, folder: Path):
        self.overrides, self.processes = overrides, processes
        self._alone, self._folder = alone, folder
        self.trainers: dict[str, Any] = {}

    def build(self, name: str) -> None:
        from recsys_norm.training.run import build

        self._say(f"building {name}")
        self.trainers[name] = None
        if name != "alone":
            self.trainers[name] = build(composed(self.overrides[name]), self.processes, _made(self._folder / name))
        elif self.processes.main:
            self.trainers[name] = build(composed(self.overrides[name]), self._alone, _made(self._folder / name))
        self.processes.barrier()

    def block(self, name: str, steps: int) -> tuple[float, list[float]] | None:
        """Milliseconds per step and the losses, or None on a rank that waits."""
        self.processes.health.at(f"a block of {steps} steps {name}")
        self._say(f"{steps} steps {name}")
        self.processes.barrier()
        trainer = self.trainers[name]
        result = None
        if trainer is not None:
            _wait(self.processes.device)
            begin = time.perf_counter()
            losses = trainer.take_steps(steps)  # waits for the device
            result = 1e3 * (time.perf_counter() - begin) / steps, losses
        self.processes.barrier()
        return result

    def _say(self, what: str) -> None:
        """What takes long, with the seconds since the start: a run that is cut off tells where."""
        if self.processes.main:
            print(f"[{time.perf_counter() - _BEGAN:5.0f} s] {what}", file=sys.stderr, flush=True)


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gathered(processes: Any, value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    values = [None] * processes.size
    if processes.cpu_group is None:
        return [value]
    dist.all_gather_object(values, value, group=processes.cpu_group)
    return values


def gate(args: argparse.Namespace, processes: Any, alone: Any, folder: Path) -> dict[str, float]:
    """Largest difference between the losses of one rank and of all ranks on the same rows, per sharding type."""
    differences = {}
    for sharding in ("table_wise", "row_wise"):
        common = ["backend=unfused", "trainer.precision=fp32", f"distributed.sharding=[{sharding}]"]
        small = ["model.tables.rows=1000", "data.vocabulary=1000"]
        each = [*case_overrides(args, "kunlun_tiny", "unfused"), *common, *small]
        whole = [*each, f"model.batch_size={composed(each).model.batch_size * processes.size}"]
        case = Case({"together": each, "alone": whole}, processes, alone, folder / f"gate_{sharding}")
        case.build("together")
        case.build("alone")
        (_, ours), theirs = case.block("together", GATE_STEPS), case.block("alone", GATE_STEPS)
        worst = max(abs(a - b) for a, b in zip(ours, theirs[1], strict=True)) if theirs else None
        differences[sharding] = processes.broadcast(worst)
        if not differences[sharding] <= GATE_TOLERANCE:
            raise RuntimeError(
                f"{sharding}: the losses of {processes.size} ranks and of one differ by {differences[sharding]:.2e}, "
                f"more than {GATE_TOLERANCE:g}"
            )
    return differences


def profiled(processes: Any, name: str, case: Case, steps: int = 3) -> dict[str, Any] | None:
    """Where the device's time of a step goes, in milliseconds: exchange that nothing hides, kernels, and idle."""
    from recsys_norm.training import profile

    if processes.device.type != "cuda":
        case.block(name, steps)
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recording:
        case.block(name, steps)
    if case.trainers[name] is None:
        return None
    spans = sorted((s, s + d, n) for n, s, d in profile.device_events(recording))
    exchange = [(s, e) for s, e, n in spans if "nccl" in n.lower()]
    work = [(s, e) for s, e, n in spans if "nccl" not in n.lower()]
    both = _covered(sorted(exchange + work))
    total = (spans[-1][1] - spans[0][0]) if spans else 0.0
    per_kernel: dict[str, float] = {}
    for s, e, n in spans:
        per_kernel[n] = per_kernel.get(n, 0.0) + (e - s) / 1e3 / steps
    largest = dict(sorted(per_kernel.items(), key=lambda item: -item[1])[:15])
    return {
        "exchange_ms": _covered(exchange) / 1e3 / steps,
        "exposed_exchange_ms": (both - _covered(work)) / 1e3 / steps,
        "kernels_ms": _covered(work) / 1e3 / steps,
        "idle_ms": (total - both) / 1e3 / steps,
        "largest_ms": {name[:80]: value for name, value in largest.items()},
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans that are sorted by their start."""
    length, last = 0.0, float("-inf")
    for start, end in spans:
        length += max(0.0, end - max(start, last))
        last = max(last, end)
    return length


def peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def measured(args: argparse.Namespace, case: Case, processes: Any) -> dict[str, Any]:
    """The record of one case, the same on every rank."""
    from recsys_norm.training.sharding import describe

    begin = time.perf_counter()
    if processes.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(processes.device)
    case.build("together")
    warmup = 2 * args.batches + 2  # a batch is recorded the second time
    case.block("together", warmup)
    together = case.trainers["together"]
    plan = describe(together.sparse, processes)
    memory = {
        "tables_bytes": sum(table["bytes_per_rank"][processes.rank] for table in plan.values()),
        "static_bytes": together.static_bytes(),
        "peak_bytes": peak(processes.device),
    }
    for name in case.overrides:
        if name != "together":
            case.build(name)
            case.block(name, warmup)
    ready = time.perf_counter() - begin
    times, losses = timed(args, case)
    everyone = gathered(processes, (times, memory))
    step = {name: max(statistics.median(t[name]) for t, _ in everyone if t[name]) for name in times}
    record = {
        "efficiency": step["alone"] / step["together"],
        "step_ms": step,
        "blocks_ms": {name: [t[name] for t, _ in everyone] for name in times},
        "steps_per_block": args.steps,
        "last_loss": gathered(processes, losses),
        "plan": plan,
        "memory_per_rank": [m for _, m in everyone],
        "profile": {name: gathered(processes, profiled(processes, name, case)) for name in times},
        "ready_s": ready,
    }
    if "strong" in step:
        record["strong_efficiency"] = step["alone"] / (step["strong"] * processes.size)
    return record


def timed(args: argparse.Namespace, case: Case) -> tuple[dict[str, list[float]], dict[str, float | None]]:
    """Milliseconds per step of each block on this rank, and the last loss; the order turns around in every round."""
    times: dict[str, list[float]] = {name: [] for name in sorted(case.overrides)}
    losses: dict[str, float | None] = dict.fromkeys(times)
    for index in range(args.rounds):
        for name in list(times)[:: 1 if index % 2 else -1]:
            result = case.block(name, args.steps)
            if result is not None:
                times[name].append(result[0])
                losses[name] = result[1][-1]
    return times, losses


def cases(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for backend in args.backends.split(","):
        for model in args.models.split(","):
            yield model, backend


def write(path: Path, record: dict[str, Any]) -> None:
    """Into the list in that file, in the place of an earlier record of the same case."""
    records = json.loads(path.read_text()) if path.exists() else []
    if "skipped" in record and any((r["model"], r["backend"]) == (record["model"], record["backend"]) for r in records):
        print(line(record) + "; the earlier record stays", flush=True)
        return
    others = [r for r in records if (r["model"], r["backend"]) != (record["model"], record["backend"])]
    path.write_text(json.dumps([*others, record], indent=1) + "\n")
    print(line(record), flush=True)


def run(args: argparse.Namespace, folder: Path) -> None:
    from recsys_norm import env
    from recsys_norm.training import runtime
    from recsys_norm.training.logging import warnings_as_lines

    with runtime.start(composed(["distributed=torchrec", *args.set])) as processes, warnings_as_lines(False):
        group = dist.new_group([0])  # every rank takes part in making it
        lone = replace(processes, rank=0, size=1, cpu_group=None, group=group)
        facts = {"world_size": processes.size, "device": processes.device.type, "env": env.record()}
        facts["gate_loss_difference"] = gate(args, processes, lone, folder)
        for index, (model, backend) in enumerate(cases(args)):
            record = {"model": model, "backend": backend, **facts}
            late = processes.broadcast(time.perf_counter() - _BEGAN > args.budget)
            if late:
                record["skipped"] = f"the budget of {args.budget:g} s was used up"
            else:
                overrides = case_overrides(args, model, backend)
                config = composed(overrides)
                batch, rows = config.data.batch_size, config.model.tables.rows
                spread = {"together": overrides, "alone": overrides}
                if args.strong:
                    spread["strong"] = [*overrides, f"model.batch_size={batch // processes.size}"]
                case = Case(spread, processes, lone, folder / str(index))
                record |= {"batch_per_rank": batch, "rows_per_table": rows, **measured(args, case, processes)}
                del case
                gc.collect()
                if processes.device.type == "cuda":
                    torch.cuda.empty_cache()
            if processes.main:
                write(args.json, record)


def line(record: dict[str, Any]) -> str:
    name = f"{record['model']} {record['backend']}"
    if "skipped" in record:
        return f"{name}: skipped, {record['skipped']}"
    step, memory = record["step_ms"], record["memory_per_rank"]
    sizes = ", ".join(f"{m['tables_bytes'] / 1e9:.2f}" for m in memory)
    return (
        f"{name}: alone {step['alone']:.1f} ms, {record['world_size']} ranks {step['together']:.1f} ms, "
        f"efficiency {record['efficiency']:.1%}; GB of tables per rank {sizes}; ready after {record['ready_s']:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--models", default="kunlun_base,kunlun_large")
    parser.add_argument("--backends", default="fused,compiled")
    parser.add_argument("--table-gb", type=float, default=22.0)
    parser.add_argument("--batches", type=int, default=4, help="of different lengths per rank, on the device")
    parser.add_argument("--strong", action="store_true", help="time all ranks with the rows of one, too")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="per block")
    parser.add_argument("--budget", type=float, default=270.0, help="seconds")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides of the configuration")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
