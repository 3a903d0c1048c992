"""`python -m recsys_norm.bench ops|train|compare`: measure ops or training steps, or compare finished runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recsys_norm.bench")
    commands = parser.add_subparsers(dest="command", required=True)
    ops = commands.add_parser("ops", help="time the ops against unfused, torch.compile and cuBLAS")
    ops.add_argument("--op", default="norm_linear,linear_norm,linear_norm_linear")
    ops.add_argument("--norm", default="rms,layer")
    ops.add_argument("--direction", default="forward,backward")
    ops.add_argument("--shapes", default="grid", help="KxN,KxN,... or 'grid'")
    ops.add_argument("--rows", type=int, default=262144, help="M")
    ops.add_argument("--launches", type=int, default=200, help="of each candidate, over all runs")
    ops.add_argument("--runs", type=int, default=5, help="fresh processes")
    ops.add_argument("--techniques", default="all", help="'all', or provider/name,... to time beside the backends")
    ops.add_argument("--time-limit", type=float, help="seconds after which no further case begins")
    ops.add_argument(
        "--jobs", type=int, default=0, help="processes that compile everything at once before the first run"
    )
    ops.add_argument("--retune", action="store_true", help="write the first process' winners to the table of 'fused'")
    ops.add_argument("--out", type=Path, default=Path("outputs/bench"))
    ops.add_argument("--name", default="ops")
    ops.add_argument("--child", help=argparse.SUPPRESS)
    train = commands.add_parser("train", help="time training steps of the backends with fixed settings")
    train.add_argument("--models", default="kunlun_base")
    train.add_argument("--backends", default="unfused,compiled,naive,fused")
    train.add_argument("--attention", default="fused", help="fused, eager or both")
    train.add_argument("--rounds", type=int, default=1, help="runs of each path, in alternating order")
    train.add_argument("--out", type=Path, default=Path("outputs/bench"))
    train.add_argument("--name", default="train")
    train.add_argument("overrides", nargs="*", help="further settings of train.py, as key=value")
    compare = commands.add_parser("compare", help="table, comparison.json and picture from finished runs")
    compare.add_argument("runs", nargs="+", type=Path, help="run or sweep folders, or JSON files of summaries")
    compare.add_argument("--out", type=Path, help="default: the first folder")
    arguments = parser.parse_args(argv)
    if arguments.command == "train":
        from recsys_norm.bench import train

        names = ("models", "backends", "attention", "rounds", "out", "name", "overrides")
        return train.run(**{name: getattr(arguments, name) for name in names})
    if arguments.command == "compare":
        return _compare(arguments.runs, arguments.out)
    return _ops(arguments)


def _compare(runs: list[Path], out: Path | None) -> int:
    from recsys_norm.bench import compare, compare_report, compare_runs

    try:
        comparison = compare.compare(compare_runs.load(runs))
    except compare_runs.CompareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    first = runs[0] if runs[0].is_dir() else runs[0].parent
    print(compare_report.report(comparison, out or first))
    return 0


def _ops(arguments: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        print("bench ops times GPU kernels and this machine has no CUDA device", file=sys.stderr)
        return 2
    from recsys_norm.bench import ops as bench
    from recsys_norm.bench import processes

    if arguments.child:
        processes.child(json.loads(arguments.child))
        return 0
    start = time.time()
    norms, shapes = arguments.norm.split(","), bench.shapes_of(arguments.shapes)
    names = arguments.op.split(",")
    cases = [c for shape in shapes for op in names for c in bench.default_cases(arguments.rows, op, norms, [shape])]
    wanted = None if arguments.techniques == "all" else arguments.techniques.split(",")
    settings = {"directions": arguments.direction.split(","), "techniques": wanted}
    if arguments.jobs:
        processes.compile_ahead(cases, settings, arguments.jobs)
        print(f"compiled ahead in {time.time() - start:.0f} s", file=sys.stderr, flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = processes.run(
        cases,
        settings,
        arguments.launches,
        arguments.runs,
        arguments.out / f"{arguments.name}.jsonl",
        None if arguments.time_limit is None else arguments.time_limit - (time.time() - start),
        _retune if arguments.retune else None,
    )
    bench.write(result, arguments.out, arguments.name)
    print(bench.table(result["records"]))
    return 0


def _retune(winners: list[dict], environment: dict) -> None:
    import torch

    from recsys_norm.ops import choices

    major, minor = torch.cuda.get_device_capability()
    print(f"wrote {choices.update(winners, 10 * major + minor, environment)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
