"""norm_linear and linear_norm with the norm done by other libraries, beside `compiled` and `fused`, on a CUDA device:

    python benchmarks/others.py                              Liger-Kernel and QuACK, whichever is importable
    python benchmarks/others.py --shapes 512x512,512x2048    some of the shapes
    python benchmarks/others.py --json FILE                  the records with GPU, driver, versions and date
    python benchmarks/others.py --table FILE...              the table of such files again, in Markdown

norm_linear = F.linear(norm(x)), linear_norm = norm(F.linear(x)), in bf16 with affine norms and biases, in training. A
library brings the norm and its gradient, F.linear is cuBLAS's in every row but `fused`. The output and every gradient
have to pass the tolerance rule against fp64 before a candidate is timed; what a library lacks has its reason in the
record. Candidates run interleaved in one process with a cold L2 (`recsys_norm.bench.timing`).

Each norm and shape has a process of its own: they compile side by side, then check and measure one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recsys_norm import _versions, env, ops
from recsys_norm.bench import ops as bench
from recsys_norm.bench.cases import Case, compile_per_shape
from recsys_norm.bench.timing import Stopwatch, percentile
from recsys_norm.testing import CAP, TINY

GRID = [(256, 256), (384, 384), (512, 512), (1024, 1024), (512, 2048), (2048, 512), (2048, 2048)]
OPS = ("norm_linear", "linear_norm")
NORMS = ("rms", "layer")
DIRECTIONS = ("forward", "both")
ROWS = 262_144
EPS = 1e-5
OWN = {"compiled": {"backend": "compiled"}, "fused": {"backend": "fused"}}
DISTRIBUTIONS = {"liger": ("liger_kernel",), "quack": ("quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi")}
SHOWN = {"liger": "Liger", "quack": "QuACK", "compiled": "compiled", "fused": "fused, ms"}

Norm = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight, bias


def liger() -> dict[str, Norm]:
    """Its autograd functions as its modules call them: RMS norm's input gradient overwrites the output gradient."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return {
        "rms": lambda x, weight, bias: LigerRMSNormFunction.apply(x, weight, EPS),
        "layer": lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS),
    }


def quack() -> dict[str, Norm]:
    """Its RMS norm, and an autograd function around its two halves of layer norm, which has none of its own."""
    module = importlib.import_module("quack.rmsnorm")  # the package's attribute of that name is the function
    norms: dict[str, Norm] = {"rms": lambda x, weight, bias: module.rmsnorm(x, weight, eps=EPS)}
    if not hasattr(module, "layernorm_bwd"):
        return norms

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            y, rstd, mean = module.layernorm_fwd(x, weight, bias, EPS, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, weight, rstd, mean = ctx.saved_tensors
            return module.layernorm_bwd(x, weight, dy.contiguous(), rstd, mean)

    return norms | {"layer": LayerNorm.apply}


LIBRARIES = {"liger": liger, "quack": quack}
LACKS = {("quack", "layer"): "this QuACK has no backward of layer norm"}
FP32_PARAMETERS = {("quack", "layer")}  # the only ones that layernorm_fwd takes


def importable() -> tuple[dict[str, dict[str, Norm]], dict[str, str]]:
    """The norms of each library that is there, and why each of the others is not."""
    found, missing = {}, {}
    for name, norms in LIBRARIES.items():
        try:
            found[name] = norms()
        except Exception as error:  # a library that fails at its import must not cost the measurements of the other
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, missing


class Peer(bench.Subject):
    """A case whose norm is another library's."""

    def __init__(self, case: Case, tensors: dict, normalize: Norm, grads: list | None):
        self._normalize = normalize
        # gradients of its own, which the library may overwrite: they shrink by the norm's scale in every launch
        super().__init__(case, tensors, {}, None if grads is None else [g.clone() for g in grads])

    def forward(self) -> tuple[Tensor]:
        t = self._tensors
        parameters = t["norm_weight"], t["norm_bias"]
        if self._case.op == "norm_linear":
            return (F.linear(self._normalize(t["x"], *parameters), t["weight"], t["bias"]),)
        return (self._normalize(F.linear(t["x"], t["weight"], t["bias"]), *parameters),)


def candidate(case: Case, label: str, norms: dict[str, dict[str, Norm]], tensors: dict, grads: list) -> bench.Subject:
    """The candidate of that name, run forward once; raises with the reason if it cannot."""
    if label in OWN:
        return bench.Subject(case, tensors, OWN[label], grads)
    if case.norm not in norms[label]:
        raise ops.UnsupportedError(LACKS.get((label, case.norm), f"{label} has no {case.norm} norm"))
    if (label, case.norm) in FP32_PARAMETERS:
        wide = {n: t.detach().float().requires_grad_() for n, t in tensors.items() if n.startswith("norm_")}
        tensors = tensors | wide
    return Peer(case, tensors, norms[label][case.norm], grads)


def candidates(case: Case, norms: dict, tensors: dict, grads: list) -> tuple[dict[str, bench.Subject], dict[str, str]]:
    """Those that run, and why the others do not."""
    subjects, skipped = {}, {}
    for label in (*norms, *OWN):
        try:
            subjects[label] = candidate(case, label, norms, tensors, grads)
        except Exception as error:
            skipped[label] = (
                str(error) if isinstance(error, ops.UnsupportedError) else f"{type(error).__name__}: {error}"
            )
    return subjects, skipped


def check(case: Case, tensors: dict, subjects: dict[str, bench.Subject], grads: list) -> dict[str, dict[str, Any]]:
    """What the output and all gradients of each candidate lose, and `skipped` where that is more than the rule allows."""
    truth = bench.Truth(case, tensors, grads)
    unfused = truth.errors(bench.Subject(case, tensors, {"backend": "unfused"}, grads), "both")
    allowed = [2 * min(e, CAP[case.dtype]) + TINY[case.dtype] for e in unfused]
    verdicts = {}
    for label, subject in subjects.items():
        try:
            found = truth.errors(subject, "both")
        except Exception as error:  # most likely a backward that does not compile
            verdicts[label] = {"skipped": f"{type(error).__name__}: {error}"}
            continue
        share = max(e / a for e, a in zip(found, allowed, strict=True))
        shown = round(share, 3) if math.isfinite(share) else None
        verdicts[label] = {"error_of_allowed": shown, "skipped": None if share <= 1 else "wrong result"}
    return verdicts


def cotangent(case: Case, tensors: dict) -> list[Tensor]:
    x = tensors["x"]
    generator = torch.Generator(device=x.device).manual_seed(1)
    return [torch.randn(case.M, case.N, device=x.device, generator=generator).to(x.dtype)]


def prepare(case: Case, norms: dict[str, dict[str, Norm]]) -> None:
    """Compile everything; what fails is reported by `measure`."""
    tensors = case.tensors()
    grads = cotangent(case, tensors)
    for label in (*norms, *OWN):
        try:
            candidate(case, label, norms, tensors, grads).both()
        except Exception as error:
            print(f"{case}, {label}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    torch.cuda.synchronize()


def measure(case: Case, norms: dict[str, dict[str, Norm]], watch: Stopwatch, launches: int) -> Iterator[dict[str, Any]]:
    """Records of one case, checked first."""
    tensors = case.tensors()
    grads = cotangent(case, tensors)
    subjects, skipped = candidates(case, norms, tensors, grads)
    verdicts = check(case, tensors, subjects, grads)
    torch.cuda.empty_cache()
    right = {label: s for label, s in subjects.items() if verdicts[label]["skipped"] is None}
    for direction in DIRECTIONS:
        times = watch.time({label: getattr(s, direction) for label, s in right.items()}, launches)
        for label in (*subjects, *skipped):
            fields = verdicts.get(label) or {"skipped": skipped[label]}
            if label in OWN and label in right:
                fields = fields | {"technique": right[label].technique(direction)}
            yield bench.record(case, direction, label, **fields, **spread(times.get(label)))


def spread(times: list[float] | None) -> dict[str, float | int | None]:
    if not times:
        return {"ms": None}
    low, high = percentile(times, 0.2), percentile(times, 0.8)
    return {"ms": statistics.median(times), "ms_p20": low, "ms_p80": high, "launches": len(times)}


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: per library the time over fused's, "forward / forward and backward"; of fused itself milliseconds."""
    ms = {tuple(r[k] for k in ("op", "norm", "backend", "K", "N", "direction")): r["ms"] for r in records}
    shapes = list(dict.fromkeys((r["K"], r["N"]) for r in records))
    lines = ["| K -> N | norm by | " + " | ".join(f"{K} -> {N}" for K, N in shapes) + " |"]
    lines.append("|---" * (2 + len(shapes)) + "|")
    for op, norm, label in itertools.product(OPS, NORMS, SHOWN):
        if not any(key[:3] == (op, norm, label) for key in ms):
            continue
        cells = []
        for shape in shapes:
            own, fused = ([ms.get((op, norm, name, *shape, d)) for d in DIRECTIONS] for name in (label, "fused"))
            pairs = [(a, 1.0 if label == "fused" else b) for a, b in zip(own, fused)]
            digits = 3 if label == "fused" else 2
            cells.append(" / ".join(f"{a / b:.{digits}f}" if a and b else "-" for a, b in pairs))
        lines.append(f"| {op} {'LN' if norm == 'layer' else 'RMS'} | {SHOWN[label]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def row(records: list[dict[str, Any]]) -> str:
    """One line per case and direction, with the reasons of what has no time."""
    first = records[0]
    line = f"{first['norm']:5} {first['op']:11} {first['K']:4} -> {first['N']:<4} {first['direction']:7}"
    for r in records:
        shown = f"{r['ms']:.4f} ({r['error_of_allowed']:.2f} of allowed)" if r["ms"] else f"- [{r['skipped'][:200]}]"
        line += f"  {r['backend']} {shown}"
    return line


def cases(norm: str, K: int, N: int, rows: int) -> list[Case]:
    return [Case(op, norm, rows, K, N) for op in OPS]


def worker(text: str, args: argparse.Namespace) -> None:
    """Compile, say so, wait for the turn, measure. Talks in lines on stdin and stdout."""
    norm, K, N = text.split(",")
    compile_per_shape()
    norms, _ = importable()
    mine = cases(norm, int(K), int(N), args.rows)
    for case in mine:
        prepare(case, norms)
        torch.cuda.empty_cache()  # for the one whose turn it is
    say({"ready": True})
    if not sys.stdin.readline():
        return
    watch = Stopwatch()
    if not 0.9 <= (ratio := watch.self_test()) <= 1.1:
        sys.exit(f"the timer reads a kernel of known duration as {ratio:.2f} of it: the GPU is shared or throttled")
    for case in mine:
        found = list(measure(case, norms, watch, args.launches))
        for direction in DIRECTIONS:
            print(row([r for r in found if r["direction"] == direction]), flush=True)
        say({"records": found})
        torch.cuda.empty_cache()


def say(message: dict[str, Any]) -> None:
    print("@" + json.dumps(message), flush=True)


def answer(process: subprocess.Popen) -> dict[str, Any] | None:
    """The next message of a worker, None when it ended. All else that it prints is passed on."""
    for line in process.stdout:
        if line.startswith("@"):
            return json.loads(line[1:])
        print(line, end="", flush=True)
    return None


def run(args: argparse.Namespace) -> dict[str, Any]:
    options = ["--rows", str(args.rows), "--launches", str(args.launches)]
    workers = {}
    for text in (f"{norm},{K},{N}" for K, N in args.shapes for norm in NORMS):
        command = [sys.executable, __file__, *options, "--worker", text]
        workers[text] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    began = time.time()
    norms, missing = importable()
    result = about(norms, missing) | {"records": []}
    there = (f"{name} {'is missing: ' + missing[name] if name in missing else 'is there'}" for name in LIBRARIES)
    print("; ".join(there), flush=True)
    ready = {text: answer(process) is not None for text, process in workers.items()}
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    for text, process in workers.items():
        if ready[text]:
            with contextlib.suppress(BrokenPipeError):  # of one that has died, which its missing answer says
                process.stdin.write("go\n")
                process.stdin.flush()
            while (message := answer(process)) is not None:
                result["records"] += message["records"]
                write(result, args.json)
        if process.wait():
            print(f"{text}: no result, its process ended with {process.returncode}", flush=True)
    return result


def about(norms: dict, missing: dict[str, str]) -> dict[str, Any]:
    versions = {d: _versions.version_of(d) for name in norms for d in DISTRIBUTIONS[name]}
    conditions = "bf16, affine, bias, one process per norm and shape, candidates interleaved, cold L2, medians"
    facts = env.record() | versions | {"date": datetime.date.today().isoformat()}
    return {"env": facts, "missing": missing, "conditions": conditions}


def write(result: dict[str, Any], path: str | None) -> None:
    """What there is so far: a run that is cut keeps what it measured."""
    if path is not None:
        with open(path, "w") as file:
            json.dump(result, file, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=GRID, type=bench.shapes_of, help="KxN pairs separated by commas")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--launches", type=int, default=30, help="of each candidate, case and direction")
    parser.add_argument("--json", help="file for the records")
    parser.add_argument("--table", nargs="+", type=Path, help="print the table of these files and measure nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args)
    elif args.table:
        print(table([r for file in args.table for r in json.loads(file.read_text())["records"]]))
    elif not torch.cuda.is_available():
        parser.error("it measures on a CUDA device and torch finds none; --table FILE shows a record without one")
    else:
        print(table(run(args)["records"]))


if __name__ == "__main__":
    main()
