"""norm_linear forward on Hopper against cuBLAS and torch.compile: `python benchmarks/hopper.py [--json FILE]`, one GPU.

bf16 with affine, bias and saved statistics. Per shape and norm: the GEMM alone (F.linear with the bias), the compiled
norm alone with the same affine and saved statistics, technique hopper/lazy, and

    hidden = (t_gemm + t_norm - t) / t_norm

The result is checked against fp64 before it is timed, on the first and last rows. Timed launches are interleaved in
random order with a cold L2 (recsys_norm/bench/timing.py), medians are reported; several process runs (`--runs`) give
medians of medians and the extremes of `hidden`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from recsys_norm import env, reference
from recsys_norm.bench.cases import GRID, Case
from recsys_norm.bench.timing import Stopwatch
from recsys_norm.kernels.hopper import lazy
from recsys_norm.testing import check_close_to_reference

EPS = 1e-5
CHECKED_ROWS = 1024
ROWS = 262144
FURTHER = [(M, n, n) for n in (512, 1024) for M in (8192, 65536, 1048576)]


def norm_and_statistics(x, gamma, beta, layer: bool):
    """What torch.compile gets: the normed rows and what a backward needs of them."""
    if layer:
        return torch.native_layer_norm(x, x.shape[-1:], gamma, beta, EPS)
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def candidates(case: Case, t: dict) -> dict[str, Callable[[], object]]:
    layer = case.norm == "layer"
    x, weight, bias, gamma, beta = (t[n] for n in ("x", "weight", "bias", "norm_weight", "norm_bias"))
    norm = torch.compile(norm_and_statistics, dynamic=False)
    return {
        "gemm": lambda: F.linear(x, weight, bias),
        "norm": lambda: norm(x, gamma, beta, layer),
        "hopper": lambda: lazy.forward(x, weight, bias, gamma, beta, layer, EPS)[0],
    }


def check(case: Case, t: dict, y: torch.Tensor) -> None:
    for rows in (slice(0, CHECKED_ROWS), slice(-CHECKED_ROWS, None)):
        part = {n: p if n != "x" or p is None else p[rows] for n, p in t.items()}
        truth = reference.norm_linear(**{n: None if p is None else p.double() for n, p in part.items()}, norm=case.norm)
        x, gamma, beta = part["x"], t["norm_weight"], t["norm_bias"]
        h = (
            F.layer_norm(x, x.shape[-1:], gamma, beta, EPS)
            if beta is not None
            else F.rms_norm(x, x.shape[-1:], gamma, EPS)
        )
        check_close_to_reference(y[rows], F.linear(h, t["weight"], t["bias"]), truth, name=f"{case}")


def measure(case: Case, watch: Stopwatch, launches: int) -> dict[str, float]:
    """Median milliseconds of each candidate."""
    torch._dynamo.reset()
    t = {n: None if p is None else p.detach() for n, p in case.tensors().items()}
    functions = candidates(case, t)
    check(case, t, functions["hopper"]())
    return {name: statistics.median(ms) for name, ms in watch.time(functions, launches).items()}


def cases(further: bool) -> list[Case]:
    sizes = [(ROWS, K, N) for K, N in GRID] + (FURTHER if further else [])
    return [Case("norm_linear", norm, M, K, N) for M, K, N in sizes for norm in ("rms", "layer")]


def merged(case: Case, runs: list[dict[str, float]]) -> dict:
    hidden = [(r["gemm"] + r["norm"] - r["hopper"]) / r["norm"] for r in runs]
    ms = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
    record = dict(norm=case.norm, M=case.M, K=case.K, N=case.N, ms=ms, hidden_lo=min(hidden), hidden_hi=max(hidden))
    return record | {"hidden": (ms["gemm"] + ms["norm"] - ms["hopper"]) / ms["norm"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=40, help="of each candidate and process run")
    parser.add_argument("--runs", type=int, default=5, help="fresh processes")
    parser.add_argument("--further", action="store_true", help="also other numbers of rows")
    parser.add_argument("--json", help="write the records to this file")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child is not None:
        watch = Stopwatch(seed=a.child)
        for case in cases(a.further):
            print(json.dumps(measure(case, watch, a.launches)), flush=True)
            torch.cuda.empty_cache()
        return
    results = []
    for seed in range(a.runs):
        command = [sys.executable, __file__, "--child", str(seed), "--launches", str(a.launches)]
        child = subprocess.run(command + ["--further"] * a.further, stdout=subprocess.PIPE, text=True, check=True)
        results.append([json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")])
    records = [merged(case, list(runs)) for case, runs in zip(cases(a.further), zip(*results))]
    for r in records:
        times = "  ".join(f"{name} {ms:.4f}" for name, ms in r["ms"].items())
        span = f"{100 * r['hidden_lo']:.0f} to {100 * r['hidden_hi']:.0f}%"
        print(f"{r['norm']:5} {r['M']:8} x {r['K']:4} -> {r['N']:4}  {times}  hidden {100 * r['hidden']:.0f}% ({span})")
    if a.json:
        with open(a.json, "w") as f:
            json.dump(dict(env=env.record(), records=records), f, indent=1)


if __name__ == "__main__":
    main()
