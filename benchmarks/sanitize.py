"""The Hopper kernels under compute-sanitizer, small cases: `python benchmarks/sanitize.py [--tools memcheck racecheck]`.

Runs `--cases` of this file under each tool, all at the same time, and fails if memcheck or synccheck found anything or
if a case gave other bits at its second run. The cases go through every form of the kernels of norm_linear (forward,
both products of the backward, with and without a sum) and linear_norm.

racecheck also reports how Triton switches between the partitions of a kernel: a byte per warp in shared memory, written
before a barrier of the whole block and read after it. Our kernels read no bytes, so a hazard whose read is an LDS.U8 is
that one; it is counted apart, by the disassembly of the cubins. The other hazards are listed and no failure: racecheck
also names shared memory that one partition hands to another through an mbarrier, so each wants a look at the code.
"""

from __future__ import annotations

import argparse
import glob
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

TOOLS = ("memcheck", "racecheck", "synccheck")
ROWS = 300  # three tiles, the last one ragged
FORWARD = [(128, 64), (256, 256), (512, 128), (264, 384), (136, 512), (520, 1024)]
BACKWARD = [(128, 64), (256, 72), (384, 136), (512, 128), (520, 128)]
POSTNORM = [(128, 256), (64, 512), (384, 760), (72, 2048), (520, 256)]


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
    from recsys_norm.kernels.hopper import postnorm, postnorm_cluster

    for K, N in POSTNORM:
        resident = postnorm_cluster.why_not(K, N, 1) is None
        x, weight, bias, gamma, beta, residual = (
            random(i, *s) for i, s in enumerate([(ROWS, K), (N, K), (N,), (N,), (N,), (ROWS, N)])
        )
        for layer, position in ((False, "before"), (True, "after"), (False, None), (True, None)):
            vectors = (bias, gamma, beta if layer else None)
            options = dict(layer=layer, eps=1e-5, position=position, write_hat=layer, write_z=not layer)
            forward = postnorm_cluster.forward if resident else postnorm.forward
            call = partial(forward, x, weight, *vectors, residual if position else None, **options)
            yield f"linear_norm {K} -> {N}{' layer' * layer}{f', residual {position}' if position else ''}", call


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


def program(name: str) -> str:
    places = [shutil.which(name), *sorted(glob.glob(f"/usr/local/cuda*/bin/{name}"))]
    found = next((p for p in places if p), None)
    if found is None:
        raise SystemExit(f"{name} is neither on the PATH nor under /usr/local/cuda*/bin; install a CUDA toolkit")
    return found


def byte_reads(entries: set[str]) -> set[tuple[str, int]]:
    """(entry, address) of every instruction that reads a byte of shared memory, in the cubins with these entries."""
    from recsys_norm.kernels.hopper import build

    disassembler = program("cuobjdump")

    def of(entry: str, path: Path, cubin: bytes) -> set[tuple[str, int]]:
        path.write_bytes(cubin)
        listing = subprocess.run([disassembler, "-sass", path], capture_output=True, text=True, check=True).stdout
        return {
            (entry, int(place, 16)) for place in re.findall(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\d )?LDS\.U8 ", listing)
        }

    found: set[tuple[str, int]] = set()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        for arch in json.loads(build.MANIFEST.read_text()).values():
            kernels = {name: k["entry"] for name, k in arch["kernels"].items() if k["entry"] in entries}
            cubins = build.read_archive(arch)
            jobs = [pool.submit(of, entry, Path(folder) / name, cubins[name]) for name, entry in kernels.items()]
            found = found.union(*(job.result() for job in jobs))
    return found


def races(lines: list[str]) -> tuple[Counter[str], int]:
    """Hazards by kernel and addresses, and how many belong to the switch between partitions."""
    pattern = r"between (\w+) access at (\w+)\+(0x[0-9a-f]+)\D+?and (\w+) access at (\w+)\+(0x[0-9a-f]+)"
    hazards = [(h[:3], h[3:]) for h in re.findall(pattern, " ".join(lines))]
    known = byte_reads({kernel for pair in hazards for _, kernel, _ in pair})
    report, switches = Counter(), 0
    for pair in hazards:
        if any(kind == "Read" and (kernel, int(at, 16)) in known for kind, kernel, at in pair):
            switches += 1
        else:
            report[", ".join(f"{kind} at {kernel}+{at}" for kind, kernel, at in pair)] += 1
    return report, switches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--lines", type=int, default=40, help="printed of each tool's report")
    parser.add_argument("--cases", action="store_true", help="only run the cases, under no tool")
    arguments = parser.parse_args()
    if arguments.cases:
        run_cases()
        return
    failed, running = [], {}
    for tool in arguments.tools:
        options = [] if tool == "racecheck" else ["--report-api-errors", "no"]
        command = [program("compute-sanitizer"), "--tool", tool, *options, "--print-limit", "100000"]
        command += [sys.executable, __file__, "--cases"]
        running[tool] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for tool, process in running.items():
        lines = process.communicate()[0].splitlines()
        cases, summary = sum(line.startswith("ok: ") for line in lines), lines[-1] if lines else ""
        print(f"== {tool}: {cases} cases, exit status {process.returncode}, {summary}")
        if tool == "racecheck":
            found, switches = races(lines)
            print(f"{switches} hazards are the switch between partitions, {found.total()} are others")
            lines = [f"{number} x {what}" for what, number in found.items()]
            clean = True
        else:
            lines = [line for line in lines if not line.startswith("ok: ")]
            clean = "ERROR SUMMARY: 0 errors" in summary
        print("\n".join(lines[: arguments.lines]), flush=True)
        if not clean or process.returncode:
            failed.append(tool)
    if failed:
        raise SystemExit(f"not clean: {', '.join(failed)}")


if __name__ == "__main__":
    main()
