"""`python -m recsys_norm.bench ops`: measure the ops on this machine's GPU."""

from __future__ import annotations

import argparse
import json
import sys
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
    ops.add_argument("--out", type=Path, default=Path("outputs/bench"))
    ops.add_argument("--name", default="ops")
    ops.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)

    import torch

    if not torch.cuda.is_available():
        print("bench ops times GPU kernels and this machine has no CUDA device", file=sys.stderr)
        return 2
    from recsys_norm.bench import ops as bench

    if arguments.child:
        bench.run_child(json.loads(arguments.child))
        return 0
    norms, shapes = arguments.norm.split(","), bench.shapes_of(arguments.shapes)
    cases = [c for op in arguments.op.split(",") for c in bench.default_cases(arguments.rows, op, norms, shapes)]
    result = bench.run(cases, arguments.direction.split(","), arguments.launches, arguments.runs)
    bench.write(result, arguments.out, arguments.name)
    print(bench.table(result["records"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
