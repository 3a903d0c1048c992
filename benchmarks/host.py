"""What a call of each op costs the host, in microseconds: `python benchmarks/host.py [--only NAME] [--json FILE]`.

Sizes are so small that kernels hardly matter: per op its forward without gradients, with gradients, and its backward, beside
the same of F.linear(F.layer_norm(x)). "whole" is with the technique that serves the op on this device, "above" with one
that only allocates its results: what checks, the dispatcher, autograd and the choice of a technique cost. Nothing waits for
the device, so on a GPU these are times of queueing. All cases take turns; a number is the median of the rounds, the least
beside it. It wants a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from recsys_norm import env, ops
from recsys_norm.ops import jagged_torch, registry

WIDTH, HEADS, LENGTH = 64, 2, 8  # two sequences of LENGTH tokens
OPS = ("norm", "norm_linear", "linear_norm", "linear_norm_linear", "norm_attention")
WAYS = ("no_grad", "forward", "backward")

Case = tuple[Callable[[], Any], list[Tensor]]  # a call, and what it has gradients for


def cases(device: str) -> dict[str, Case]:
    def parameters(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    row, square, heads = (WIDTH,), (WIDTH, WIDTH), (2 * LENGTH, HEADS, WIDTH // HEADS)
    x, w, b, gamma, beta, w2, b2 = parameters((2 * LENGTH, WIDTH), square, row, row, row, square, row)
    q, k, v = parameters(heads, heads, heads)
    offsets = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32, device=device)
    attention = (q, k, v, offsets, offsets)
    lengths: Any = dict(max_q_len=LENGTH, max_k_len=LENGTH)
    how: Any = dict(technique=None if device == "cuda" else "separate")
    norm: Any = dict(norm="layer", norm_weight=gamma, norm_bias=beta, **how)
    norms: Any = dict(pre_norm="layer", pre_norm_weight=gamma, pre_norm_bias=beta, post_norm="rms", **lengths, **how)
    weights = [x, w, b, gamma, beta]
    return {
        "torch: layer_norm, linear": (lambda: F.linear(F.layer_norm(x, row, gamma, beta), w, b), weights),
        "layer_norm": (lambda: ops.layer_norm(x, gamma, beta, **how), [x, gamma, beta]),
        "norm_linear": (lambda: ops.norm_linear(x, w, b, **norm), weights),
        "linear_norm": (lambda: ops.linear_norm(x, w, b, **norm), weights),
        "linear_norm_linear": (lambda: ops.linear_norm_linear(x, w, b, w2, b2, **norm), [*weights, w2, b2]),
        "norm_attention": (lambda: ops.norm_attention(*attention, packed=True, **norms), [q, k, v, gamma, beta]),
        "jagged gdpa": (lambda: ops.jagged_attention(*attention, **lengths), [q, k, v]),
        "jagged softmax": (lambda: ops.jagged_attention(*attention, softmax=True, **lengths), [q, k, v]),
    }


def allocating(function: Callable) -> Callable:
    """The function in its first call; from then on what only allocates the same results."""
    results: list[Any] = []

    def like(result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(map(like, result))
        return result if result is None else torch.empty_like(result)

    def run(*args: Any) -> Any:
        if not results:
            results.append(function(*args))
        return like(results[0])

    return run


class Allocates:
    def __init__(self, technique: Any):
        self.name, self.provider, self.why_not = technique.name, technique.provider, technique.why_not
        self.forward, self.backward = allocating(technique.forward), allocating(technique.backward)


@contextmanager
def nothing_computed() -> Iterator[None]:
    """Inside, every technique, and on the CPU jagged attention, only allocates."""
    real = {op: registry.techniques(op) for op in OPS}
    for op, techniques in real.items():
        for technique in techniques:
            registry.register(op, Allocates(technique))
    names = ("grouped_forward", "grouped_backward", "check_lengths")
    try:
        with mock.patch.multiple(jagged_torch, **{name: allocating(getattr(jagged_torch, name)) for name in names}):
            yield
    finally:
        for op, techniques in real.items():
            for technique in techniques:
                registry.register(op, technique)


def calls(case: Case) -> dict[str, Callable[[], object]]:
    function, inputs = case
    y = function()
    dy = torch.ones_like(y)
    return {
        "no_grad": function,
        "forward": function,
        "backward": lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True),
    }


def measure(device: str, only: str, rounds: int, repeats: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Microseconds of each case and way: (median, least) of the rounds."""
    functions = {n: calls(case) for n, case in cases(device).items() if only in n}
    times: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in functions}
    for turn in range(rounds + 1):  # the first to warm up
        for name, ways in functions.items():
            for way, call in ways.items():
                start = time.perf_counter()
                with torch.set_grad_enabled(way != "no_grad"):
                    for _ in range(repeats):
                        call()
                if turn:
                    times[name][way].append((time.perf_counter() - start) / repeats * 1e6)
                if device == "cuda":
                    torch.cuda.synchronize()
    return {name: {way: (statistics.median(t), min(t)) for way, t in ways.items()} for name, ways in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=200, help="calls in a row")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {"whole": measure(args.device, args.only, args.rounds, args.repeats)}
    with nothing_computed():
        found["above"] = measure(args.device, args.only, args.rounds, args.repeats)
    print(f"{'median/least us':28}" + "".join(f"{kind + ' ' + way:>18}" for kind in found for way in WAYS))
    for name in found["whole"]:
        row = [found[kind][name][way] for kind in found for way in WAYS]
        print(f"{name:28}" + "".join(f"{median:10.0f} /{least:6.0f}" for median, least in row), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"env": env.record(), "us": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
