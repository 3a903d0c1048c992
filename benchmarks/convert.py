"""A training step of other people's models before and after `recsys_norm.convert`, on a CUDA device, in bf16:

    python benchmarks/convert.py                          all kinds, eager and through torch.compile
    python benchmarks/convert.py --kinds "dlrm|hstu"      kinds whose name holds one of these texts
    python benchmarks/convert.py --eager                  without torch.compile, whose compilations take most of the time
    python benchmarks/convert.py --json FILE              the records with GPU, versions and date

A step is forward, loss and backward; the optimizer is the same before and after and stays outside. First the output and
every gradient have to pass the tolerance rule against fp64, or nothing is timed. `small` is the same model with 1/32 of
the rows, eager, where launches decide: an op costs the host more than the module calls that it replaces.

Each kind has a process of its own: they build and compile side by side, then measure one after another.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import subprocess
import sys
import time
from typing import Any

SMALL_SHARE = 32


def worker(name: str, args: argparse.Namespace) -> None:
    """Prepare, say so, wait for the turn, measure. Talks in lines on stdin and stdout."""
    import torch

    from recsys_norm.bench import convert_models as models
    from recsys_norm.bench.convert import Case, techniques_of

    kind = (models.KINDS | models.LIBRARY_KINDS)[name]
    build = (lambda size: models.dlrm(size, fused_tables=True)) if name == "dlrm" else None
    case = Case(kind, compiled=not args.eager, build=build)
    techniques = {}
    for candidate in case.candidates:
        case.results(case.candidates[candidate], case.inputs)  # compiles
    techniques = techniques_of(case)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # for the one whose turn it is
    say("ready")
    sys.stdin.readline()
    about = {
        "kind": name,
        "size": dataclasses.asdict(kind.size),
        "replaced": [f"{op}: {' + '.join(names)}" for op, names in case.report.replaced],
        "left": case.report.left,
        "techniques": techniques,
    }
    say(json.dumps([about | record for record in records(case, args)]))
    small = Case(kind, rows=max(kind.size.rows // SMALL_SHARE, 1), build=build)
    say(json.dumps([about | record | {"small": True} for record in records(small, args)]))


def say(line: str) -> None:
    print("@" + line, flush=True)


def records(case: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    from recsys_norm.bench.convert import measure

    checked = case.check()
    torch.cuda.empty_cache()
    ratios = {name: max(c.ratio for c in found) for name, found in checked.items()}
    return [
        {"candidate": name, "tokens": case.tokens, "error_ratio": round(ratios.get(name, 0.0), 3), **times}
        for name, times in measure(case, args.rounds, args.steps).items()
    ]


def answer(process: subprocess.Popen) -> str | None:
    """The next line a worker says, None when it ended. All else that it prints is passed on."""
    for line in process.stdout:
        if line.startswith("@"):
            return line[1:].strip()
        print(line, end="", flush=True)
    return None


def run(args: argparse.Namespace) -> None:
    from recsys_norm.bench.convert_models import KINDS, LIBRARY_KINDS

    there = [name for name in LIBRARY_KINDS if importlib.util.find_spec(name.split()[0])]
    wanted = [name for name in (*KINDS, *there) if any(text in name for text in args.kinds.split("|"))]
    command = [sys.executable, __file__, "--rounds", str(args.rounds), "--steps", str(args.steps)]
    command += ["--eager"] if args.eager else []
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    workers = {name: subprocess.Popen([*command, "--worker", name], **pipes) for name in wanted}
    began = time.time()
    ready = {name: answer(process) is not None for name, process in workers.items()}
    print(f"prepared in {time.time() - began:.0f} s", flush=True)
    found: list[dict[str, Any]] = []
    for name, process in workers.items():
        if ready[name]:
            process.stdin.write("go\n")
            process.stdin.flush()
            while (line := answer(process)) is not None:
                batch = json.loads(line)
                found += batch
                print(table(batch), flush=True)
                write(found, args.json)
        if process.wait():
            print(f"{name}: no result, its process ended with {process.returncode}", flush=True)


def write(found: list[dict[str, Any]], path: str | None) -> None:
    """What there is so far: a run that is cut keeps what it measured."""
    if path is None:
        return
    from recsys_norm import env

    about = env.record() | {"date": datetime.date.today().isoformat()}
    with open(path, "w") as file:
        json.dump({"env": about, "records": found}, file, indent=1)


def table(found: list[dict[str, Any]]) -> str:
    """One line per kind and pair of candidates."""
    lines = []
    by = {(r["kind"], bool(r.get("small")), r["candidate"]): r for r in found}
    for (kind, small, candidate), after in by.items():
        before = by.get((kind, small, candidate.replace("after", "before")))
        if "after" not in candidate or before is None:
            continue
        label = f"{kind}{' small' if small else ''}{', compiled' if 'compiled' in candidate else ''}"
        lines.append(
            f"{label:32} {after['tokens']:6} rows  {before['ms']:7.3f} -> {after['ms']:7.3f} ms "
            f"({after['ms'] / before['ms']:.3f})  device {before['gpu_ms']:7.3f} -> {after['gpu_ms']:7.3f}  "
            f"host {before['host_ms']:6.3f} -> {after['host_ms']:6.3f}  "
            f"memory {before['peak_bytes'] / 1e6:6.0f} -> {after['peak_bytes'] / 1e6:6.0f} MB  "
            f"error/allowed {after['error_ratio']:.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="", help="text that a kind's name holds, alternatives separated by |")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps per round and candidate")
    parser.add_argument("--json", help="file for the records")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args)
        return
    run(args)


if __name__ == "__main__":
    main()
