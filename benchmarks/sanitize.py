"""The Hopper kernels under compute-sanitizer, small cases: `python benchmarks/sanitize.py [--tools memcheck racecheck]`.

Runs `--cases` of this file under each tool, all at the same time, and prints what the tool says at the end. Fails if a
tool found anything, or if a result under it differs from a run without it. The cases go through every form of the
kernels of norm_linear (forward, both products of the backward, with and without a sum) and linear_norm.
"""

from __future__ import annotations

import argparse
import glob
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

TOOLS = ("memcheck", "racecheck", "synccheck")
ROWS = 300  # three tiles, the last one ragged
FORWARD = [(128, 64), (256, 256), (512, 128), (264, 384), (136, 512), (520, 1024)]
BACKWARD = [(128, 64), (256, 72), (384, 136), (512, 128), (520, 128)]
POSTNORM = [(128, 256), (64, 512), (384, 760), (72, 2048)]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Made on the CPU, so that only the kernels under test run under the tool."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).cuda()


def forward_cases() -> Iterator[tuple[str, Callable[[], tuple]]]:
    from recsys_norm.kernels.hopper import lazy

    for K, N in FORWARD:
        x, weight, bias, gamma, beta = (random(i, *s) for i, s in enumerate([(ROWS, K), (N, K), (N,), (K,), (K,)]))
        for layer in (False, True):
            call = partial(lazy.forward, x, weight, bias, gamma, beta if layer else None, layer, 1e-5)
            yield f"norm_linear forward {K} -> {N}{' layer' * layer}", call


def backward_cases() -> Iterator[tuple[str, Callable[[], tuple]]]:
    from recsys_norm.kernels.hopper import backward, lazy

    for K, N in BACKWARD:
        x, weight, bias, gamma, beta = (random(i, *s) for i, s in enumerate([(ROWS, K), (N, K), (N,), (K,), (K,)]))
        dy, add = random(5, ROWS, N), random(6, ROWS, K)
        for norm in ("rms", "layer"):
            layer = norm == "layer"
            parameters = (weight, bias, gamma, beta if layer else None)
            y, mean, rstd = lazy.forward(x, *parameters, layer, 1e-5)
            saved, needs = (x, *parameters, mean, rstd, y), (True, True, True, True, layer)
            for extra in (None, add):
                call = partial(backward.backward, norm, 1e-5, saved, dy, needs, extra)
                yield f"norm_linear backward {K} -> {N} {norm}{'' if extra is None else ' with a sum'}", call


def postnorm_cases() -> Iterator[tuple[str, Callable[[], tuple]]]:
    from recsys_norm.kernels.hopper import postnorm

    for K, N in POSTNORM:
        x, weight, bias, gamma, beta, residual = (
            random(i, *s) for i, s in enumerate([(ROWS, K), (N, K), (N,), (N,), (N,), (ROWS, N)])
        )
        for layer, position in ((False, "before"), (True, "after")):
            vectors = (bias, gamma, beta if layer else None)
            options = dict(layer=layer, eps=1e-5, position=position, write_hat=layer, write_z=not layer)
            call = partial(postnorm.forward, x, weight, *vectors, residual, **options)
            yield f"linear_norm {K} -> {N}{' layer' * layer}", call


def run_cases() -> None:
    for cases in (forward_cases, backward_cases, postnorm_cases):
        for name, call in cases():
            results = [t.cpu() for t in call() if t is not None]  # no comparison on the device: fewer kernels to check
            again = [t.cpu() for t in call() if t is not None]
            same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(results, again))
            finite = all(bool(t.float().isfinite().all()) for t in results)
            print(f"{'ok' if same and finite else 'WRONG'}: {name}", flush=True)
            if not (same and finite):
                sys.exit(3)


def sanitizer() -> str:
    places = [shutil.which("compute-sanitizer"), *sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"))]
    found = next((p for p in places if p), None)
    if found is None:
        raise SystemExit(
            "compute-sanitizer is neither on the PATH nor under /usr/local/cuda*/bin; install a CUDA toolkit"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS[:2])
    parser.add_argument("--lines", type=int, default=60, help="printed of each tool's report")
    parser.add_argument("--cases", action="store_true", help="only run the cases, under no tool")
    arguments = parser.parse_args()
    if arguments.cases:
        run_cases()
        return
    program, failed = sanitizer(), []
    running = {}
    for tool in arguments.tools:
        command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", sys.executable, __file__]
        running[tool] = subprocess.Popen(
            [*command, "--cases"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for tool, process in running.items():
        lines = process.communicate()[0].splitlines()
        failed += [tool] if process.returncode else []
        cases = sum(line.startswith("ok: ") for line in lines)
        print(f"== {tool}: {cases} cases, exit status {process.returncode}")
        print("\n".join([line for line in lines if not line.startswith("ok: ")][-arguments.lines :]), flush=True)
    if failed:
        raise SystemExit(f"not clean: {', '.join(failed)}")


if __name__ == "__main__":
    main()
