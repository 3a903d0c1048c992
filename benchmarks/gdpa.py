"""Time the jagged attention kernels against their roofline and against variable-length flash attention, on a CUDA device.

    python benchmarks/gdpa.py                  the shipped configurations at all shapes
    python benchmarks/gdpa.py --sweep          also other block sizes, at three of the shapes
    python benchmarks/gdpa.py --json FILE      one JSON object per line in FILE, too
    python benchmarks/gdpa.py --activation A   another activation than gelu_tanh

On Hopper what is shipped are kernels of their own; "triton" is the kernel of the other GPUs.

No time is printed for a result that fails the tolerance rule or that differs between two runs. A time is the median over
launches that are interleaved with those of the other candidates of the shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recsys_norm.bench.timing import Stopwatch
from recsys_norm.kernels.gdpa import configs, launch
from recsys_norm.kernels.gdpa.configs import Config
from recsys_norm.ops.activations import get
from recsys_norm.reference import attention_one
from recsys_norm.testing import check_close_to_reference

BYTES_PER_S, FLOPS_PER_S = 4.27e12, 790e12  # H200: device copy, best cuBLAS bf16
KEYS, WIDTH, ACTIVATION = 128, 128, "gelu_tanh"
ROUNDS = 15

FORWARD_SWEEP = [
    (Config(64, 128, 4, 1), None),
    (Config(64, 128, 4, 1), 1),
    (Config(64, 128, 4, 1), 2),
    (Config(64, 128, 4, 1), 4),
    (Config(128, 128, 8, 1), None),
    (Config(64, 128, 8, 1), None),
    (Config(32, 128, 4, 1), None),
]
BACKWARD_SWEEP = [
    (Config(64, 128, 8, 3), 1),
    (Config(64, 128, 8, 3), 2),
    (Config(64, 128, 8, 2), 1),
    (Config(32, 128, 8, 3), 1),
    (Config(32, 128, 8, 4), 1),
]


@dataclass(frozen=True)
class Shape:
    """Query lengths uniform in [1, longest], 128 keys for every sequence."""

    batch: int
    heads: int
    longest: int
    tokens: int | None = None  # scales the lengths to this many queries

    @property
    def name(self) -> str:
        return f"B={self.batch} H={self.heads} L={self.longest}"


SHAPES = [Shape(768, heads, longest) for longest in (512, 1024, 2000, 3000) for heads in (2, 4, 8)]
PFFN = Shape(512, 4, 1024, tokens=262144)
SWEPT = (Shape(768, 2, 512), Shape(768, 4, 2000), PFFN)


class Data:
    """Random tensors of one shape and the launch's description."""

    def __init__(self, shape: Shape, activation: str = ACTIVATION, seed: int = 0):
        self.activation = activation
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, shape.longest + 1, (shape.batch,), generator=g)
        if shape.tokens is not None:  # steps of one token until the sum fits
            while (missing := shape.tokens - int(lengths.sum())) != 0:
                step = torch.randint(0, shape.batch, (abs(missing),), generator=g).bincount(minlength=shape.batch)
                lengths = (lengths + step * (1 if missing > 0 else -1)).clamp(1, shape.longest)
        self.lengths = lengths.tolist()
        self.q_offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()
        self.k_offsets = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * KEYS
        T, U = sum(self.lengths), shape.batch * KEYS

        def randn(rows: int) -> Tensor:
            return torch.randn(rows, shape.heads, WIDTH, device="cuda", dtype=torch.bfloat16)

        self.q, self.k, self.v, self.grad = randn(T), randn(U), randn(U), randn(T)
        runs = [(0, shape.heads, get(activation).code)]
        self.spec = launch.Spec(max(self.lengths), KEYS, runs, 1 / shape.longest, None, None)
        self.arguments = (self.q, self.k, self.v, self.q_offsets, self.k_offsets)
        row = shape.heads * WIDTH
        flops = 2 * T * KEYS * row
        self.roofline_s = {
            "forward": max(4 * (T + U) * row / BYTES_PER_S, 2 * flops / FLOPS_PER_S),
            "backward": max(2 * (3 * T + 4 * U) * row / BYTES_PER_S, 5 * flops / FLOPS_PER_S),
        }
        self.flops = {"forward": 2 * flops, "backward": 5 * flops}

    def forward(self, config: Config | None = None, programs: int | None = None) -> tuple[Tensor]:
        return (launch.forward(*self.arguments, self.spec, config=config, programs=programs),)

    def backward(self, config: Config | None = None, splits: int | None = None) -> tuple[Tensor, ...]:
        return launch.backward(self.grad, *self.arguments, self.spec, config=config, splits=splits)

    def check(self, results: tuple[Tensor, ...], again: tuple[Tensor, ...]) -> float:
        """Assert the tolerance rule on three sequences and equal bits of two runs; returns the worst error / allowed."""
        for first, second in zip(results, again):
            assert torch.equal(first, second), "two runs differ"
        worst = 0.0
        for b in (0, len(self.lengths) // 2, len(self.lengths) - 1):
            start = sum(self.lengths[:b])
            rows, keys = slice(start, start + self.lengths[b]), slice(b * KEYS, (b + 1) * KEYS)
            names = ("o",) if len(results) == 1 else ("dq", "dk", "dv")
            expected, unfused = (self._loop(rows, keys, t) for t in (torch.float64, torch.bfloat16))
            for name, result in zip(names, results):
                part = result[keys if name in ("dk", "dv") else rows]
                worst = max(worst, check_close_to_reference(part, unfused[name], expected[name], name=name).ratio)
        return worst

    def _loop(self, rows: slice, keys: slice, dtype: torch.dtype) -> dict[str, Tensor]:
        q, k, v = (t.to(dtype).detach().requires_grad_() for t in (self.q[rows], self.k[keys], self.v[keys]))
        options = dict(activations=(self.activation,), softmax=False, scale=self.spec.scale, causal=False, window=None)
        o = attention_one(q, k, v, **options)
        grads = torch.autograd.grad(o, (q, k, v), self.grad[rows].to(dtype))
        return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads)))

    def flash(self) -> dict[str, Callable[[], Any]]:
        """Softmax attention of the same tensors by torch.nn.attention.varlen, {} where torch has none."""
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            return {}
        q, k, v = (t.detach().requires_grad_() for t in (self.q, self.k, self.v))

        def forward():
            return varlen_attn(q, k, v, self.q_offsets, self.k_offsets, max(self.lengths), KEYS)

        o = forward()
        return {
            "forward": forward,
            "backward": lambda: torch.autograd.grad(o, (q, k, v), self.grad, retain_graph=True),
        }


def measure(shape: Shape, sweep: bool, activation: str) -> list[dict[str, Any]]:
    data, records = Data(shape, activation), []
    flash = data.flash()
    for direction, variants in (("forward", FORWARD_SWEEP), ("backward", BACKWARD_SWEEP)):
        run = getattr(data, direction)
        candidates: dict[str, Callable[[], Any]] = {"shipped": run}
        if direction == "backward":
            candidates["triton"] = lambda run=run: run(None, 1)
        else:
            candidates["triton"] = lambda run=run: run(configs.forward_resident(90, WIDTH, KEYS))
        if sweep:
            for config, programs in variants:
                name = f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages} p{programs}"
                candidates[name] = lambda run=run, config=config, programs=programs: run(config, programs)
        ratios = {}
        for name in list(candidates):
            try:
                ratios[name] = data.check(candidates[name](), candidates[name]())
            except Exception as error:  # a candidate that does not fit or is wrong has no time
                print(f"{shape.name} {direction} {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                del candidates[name]
        if direction in flash:
            candidates["flash"] = flash[direction]
        for name, times in Stopwatch().time(candidates, ROUNDS).items():
            ms = statistics.median(times)
            records.append(
                {
                    "shape": shape.name,
                    "tokens": data.q.shape[0],
                    "direction": direction,
                    "candidate": name,
                    "ms": round(ms, 4),
                    "roofline": round(1e3 * data.roofline_s[direction] / ms, 3),
                    "tflops": round(data.flops[direction] / ms / 1e9, 1),
                    "error_ratio": round(ratios[name], 3) if name in ratios else None,
                }
            )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="also other block sizes, at three of the shapes")
    parser.add_argument("--json", help="file for one JSON object per line")
    parser.add_argument("--activation", default=ACTIVATION, help=f"instead of {ACTIVATION}")
    arguments = parser.parse_args()
    began = time.time()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    sink = open(arguments.json, "w") if arguments.json else None
    for shape in [*SWEPT, *(s for s in SHAPES if s not in SWEPT)]:
        for record in measure(shape, arguments.sweep and shape in SWEPT, arguments.activation):
            print(" ".join(f"{k}={v}" for k, v in record.items()), flush=True)
            if sink:
                print(json.dumps(record), file=sink, flush=True)
        torch.cuda.empty_cache()
    print(f"{time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
