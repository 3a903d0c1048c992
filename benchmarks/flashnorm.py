"""Time FlashNormAttention against the same attention kernels between compiled norms, on a CUDA device.

    python benchmarks/flashnorm.py                      forward and backward at all shapes
    python benchmarks/flashnorm.py --pieces             also each kernel apart and other block sizes, at some shapes
    python benchmarks/flashnorm.py --only "H=4 L=2000"  the shapes whose name holds this text
    python benchmarks/flashnorm.py --json FILE          one JSON object per line in FILE, too

gelu_tanh, scale 1/L, LayerNorm of q, RMSNorm of the output, both affine, inner residual, outer residual q, training:
all that the backward needs is saved. No time is printed for a result that fails the tolerance rule on three sequences
or differs between two runs. A time is the median over launches interleaved with those of the other candidates.
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

from recsys_norm import ops, reference
from recsys_norm.bench.timing import Stopwatch, percentile
from recsys_norm.kernels.flashnorm import launch
from recsys_norm.kernels.gdpa.configs import Config
from recsys_norm.kernels.norm.launch import norm_backward, norm_forward
from recsys_norm.ops.activations import get
from recsys_norm.testing import check_close_to_reference, relative_error

BYTES_PER_S, FLOPS_PER_S = 4.27e12, 790e12  # H200: device copy, best cuBLAS bf16
KEYS, WIDTH, ACTIVATION = 128, 128, "gelu_tanh"
BACKENDS = {
    "flashnorm": dict(backend="fused", technique="triton/flashnorm"),
    "hopper": dict(backend="fused", technique="hopper/flashnorm"),
    "separate": dict(backend="fused", technique="separate"),
    "compiled": dict(backend="compiled"),
}
LEAVES = ("q", "k", "v", "pre_norm_weight", "pre_norm_bias", "post_norm_weight")


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


SHAPES = [Shape(768, heads, longest) for heads in (2, 4, 8) for longest in (512, 1024, 2000, 3000)]
PFFN = Shape(512, 4, 1024, tokens=262144)  # of kunlun_base


class Data:
    """Random tensors of one shape and calls of the op on them."""

    def __init__(self, shape: Shape, seed: int = 0):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, shape.longest + 1, (shape.batch,), generator=g)
        if shape.tokens is not None:  # steps of one token until the sum fits
            while (missing := shape.tokens - int(lengths.sum())) != 0:
                step = torch.randint(0, shape.batch, (abs(missing),), generator=g).bincount(minlength=shape.batch)
                lengths = (lengths + step * (1 if missing > 0 else -1)).clamp(1, shape.longest)
        self.shape, self.lengths = shape, lengths.tolist()
        self.q_offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()
        self.k_offsets = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * KEYS
        T, U, D = sum(self.lengths), shape.batch * KEYS, shape.heads * WIDTH

        def randn(*size: int, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return (torch.randn(size, device="cuda") + mean).to(dtype)

        self.grad = randn(T, shape.heads, WIDTH)
        self.leaves = {
            "q": randn(T, shape.heads, WIDTH, mean=0.3),
            "k": randn(U, shape.heads, WIDTH),
            "v": randn(U, shape.heads, WIDTH),
            "pre_norm_weight": randn(D, mean=1.0, dtype=torch.float32),
            "pre_norm_bias": randn(D, dtype=torch.float32),
            "post_norm_weight": randn(D, mean=1.0, dtype=torch.float32),
        }
        for leaf in self.leaves.values():
            leaf.requires_grad_()
        self.options = dict(
            max_q_len=max(self.lengths),
            max_k_len=KEYS,
            activation=ACTIVATION,
            scale=1 / shape.longest,
            pre_norm="layer",
            post_norm="rms",
            inner_residual=True,
        )
        self.bytes = {"forward": 2 * (3 * T + 2 * U) * D, "backward": 2 * (4 * T + 4 * U) * D}
        self.flops = {"forward": 4 * T * KEYS * D, "backward": 10 * T * KEYS * D}

    def forward(self, **policy: Any) -> Tensor:
        q, k, v, weight, bias, post = self.leaves.values()
        norms = dict(pre_norm_weight=weight, pre_norm_bias=bias, post_norm_weight=post)
        tensors = (q, k, v, self.q_offsets, self.k_offsets)
        return ops.norm_attention(*tensors, **self.options, **norms, residual=q, packed=True, **policy)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, tuple(self.leaves.values()), self.grad, retain_graph=True)

    def roofline_ms(self, direction: str) -> float:
        directions = ("forward", "backward") if direction == "both" else (direction,)
        return 1e3 * sum(max(self.bytes[d] / BYTES_PER_S, self.flops[d] / FLOPS_PER_S) for d in directions)

    def check(self, **policy: Any) -> float:
        """Assert the tolerance rule on three sequences, equal bits of two runs, and parameter gradients near those of
        the separate kernels; returns the worst error / allowed."""
        results, again = (
            (out.detach(), *self.backward(out)) for out in (self.forward(**policy), self.forward(**policy))
        )
        for name, first, second in zip(("out", *LEAVES), results, again):
            assert torch.equal(first, second), f"two runs differ in {name}"
        others = self.backward(self.forward(**BACKENDS["separate"]))
        for name, mine, other in list(zip(LEAVES, results[1:], others))[3:]:
            error = relative_error(mine, other.double(), rows=False)
            assert error < 1e-2, f"{name} is {error:.1e} from that of the separate kernels"
        worst = 0.0
        for b in (0, len(self.lengths) // 2, len(self.lengths) - 1):
            start = sum(self.lengths[:b])
            rows, keys = slice(start, start + self.lengths[b]), slice(b * KEYS, (b + 1) * KEYS)
            expected, unfused = (self._one(rows, keys, t) for t in (torch.float64, torch.bfloat16))
            for name, result in zip(("out", "q", "k", "v"), results):
                part = result[keys if name in ("k", "v") else rows]
                worst = max(worst, check_close_to_reference(part, unfused[name], expected[name], name=name).ratio)
        return worst

    def _one(self, rows: slice, keys: slice, dtype: torch.dtype) -> dict[str, Tensor]:
        cut = {"q": rows, "k": keys, "v": keys}
        leaves = {n: x.detach()[cut.get(n, slice(None))].to(dtype).requires_grad_() for n, x in self.leaves.items()}
        q, k, v, weight, bias, post = leaves.values()
        offsets = [torch.tensor([0, x.shape[0]], device="cuda", dtype=torch.int32) for x in (q, k)]
        norms = dict(pre_norm_weight=weight, pre_norm_bias=bias, post_norm_weight=post, residual=q)
        function, more = (
            (reference.norm_attention, {}) if dtype == torch.float64 else (ops.norm_attention, dict(backend="unfused"))
        )
        out = function(q, k, v, *offsets, **self.options, **norms, **more)
        return {"out": out.detach(), **dict(zip("qkv", torch.autograd.grad(out, (q, k, v), self.grad[rows].to(dtype))))}


def measure(shape: Shape, backends: list[str], rounds: int) -> list[dict[str, Any]]:
    data, records, ratios = Data(shape), [], {}
    forward: dict[str, Callable[[], Any]] = {}
    backward: dict[str, Callable[[], Any]] = {}
    for name in backends:
        policy = BACKENDS[name]
        try:
            ratios[name] = data.check(**policy)
        except Exception as error:  # a candidate that is wrong has no time
            print(f"{shape.name} {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        out = data.forward(**policy)
        forward[name] = lambda policy=policy: data.forward(**policy)
        backward[name] = lambda out=out: data.backward(out)
    times = {"forward": Stopwatch().time(forward, rounds), "backward": Stopwatch().time(backward, rounds)}
    times["both"] = {n: [a + b for a, b in zip(times["forward"][n], times["backward"][n])] for n in forward}
    for direction, measured in times.items():
        medians = {n: statistics.median(t) for n, t in measured.items()}
        for name, ms in medians.items():
            base = medians.get("compiled")
            records.append(
                {
                    "shape": shape.name,
                    "tokens": data.grad.shape[0],
                    "direction": direction,
                    "candidate": name,
                    "ms": round(ms, 4),
                    "ms_p20": round(percentile(measured[name], 0.2), 4),
                    "ms_p80": round(percentile(measured[name], 0.8), 4),
                    "saved": None if base is None else round(1 - ms / base, 3),
                    "roofline": round(data.roofline_ms(direction) / ms, 3),
                    "error_ratio": round(ratios[name], 3),
                }
            )
    return records


FORWARD_SWEEP = [(Config(64, 128, 4, 1), splits) for splits in (None, 1, 2, 4)]
BACKWARD_SWEEP = [Config(64, 128, 8, 3), Config(64, 128, 8, 2), Config(32, 128, 8, 3)]


def parts(data: Data) -> dict[str, Callable[[], Any]]:
    """Calls of the kernels apart, with other block sizes and numbers of programs per sequence."""
    q, k, v, weight, bias, post = (x.detach() for x in data.leaves.values())
    runs = [(0, data.shape.heads, get(ACTIVATION).code)]
    spec = launch.Spec(max(data.lengths), KEYS, runs, 1 / data.shape.longest, None, None)
    tensors, cut = (q, k, v, data.q_offsets, data.k_offsets), (data.q_offsets, 1)
    mean, centre, rstd = launch.row_statistics(q, data.q_offsets, True, False, 1e-5)
    pre = launch.PreNorm("layer", False, weight, bias, mean, rstd, centre)

    def attend(**override: Any) -> Tensor:
        return launch.forward(*tensors, None, spec, pre, launch.PostNorm(None), inner=True, **override)[0]

    z, rows, grad = attend().flatten(1), q.flatten(1), data.grad.flatten(1)
    normed = norm_forward(z, post, norm="rms", eps=1e-5, after=rows, write_hat=True, cut=cut)

    def after() -> Any:
        rms = dict(norm="rms", hat=True, dweight=torch.float32, cut=cut)
        return norm_backward(grad, normed.hat, None, normed.rstd, post, **rms)

    do = after().dz
    dqn = launch.backward(do.view(q.shape), *tensors, spec, pre)[0].flatten(1)
    layer = dict(norm="layer", more_dy=do, dweight=torch.float32, dbias=torch.float32, cut=cut)
    candidates: dict[str, Callable[[], Any]] = {
        "statistics of q": lambda: launch.row_statistics(q, data.q_offsets, True, False, 1e-5),
        "post-norm": lambda: norm_forward(z, post, norm="rms", eps=1e-5, after=rows, write_hat=True, cut=cut),
        "post-norm backward": after,
        "pre-norm backward": lambda: norm_backward(dqn, rows, mean, rstd, weight, **layer),
    }
    for config, splits in FORWARD_SWEEP:
        candidates[f"forward {config} {splits}"] = lambda c=config, s=splits: attend(config=c, splits=s)
    for config in BACKWARD_SWEEP:
        candidates[f"backward {config}"] = lambda c=config: launch.backward(
            do.view(q.shape), *tensors, spec, pre, config=c
        )
    return candidates


def pieces(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """Times of the kernels apart."""
    candidates = parts(Data(shape))
    for name in list(candidates):
        try:
            candidates[name]()
            torch.cuda.synchronize()
        except Exception as error:  # what does not fit has no time
            print(f"{shape.name} {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            del candidates[name]
    times = Stopwatch().time(candidates, rounds, warmup=1)
    return [{"shape": shape.name, "piece": n, "ms": round(statistics.median(t), 4)} for n, t in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pieces", action="store_true", help="also each kernel apart and other block sizes")
    parser.add_argument("--only", default="", help="text that a shape's name holds, alternatives separated by |")
    parser.add_argument("--backends", default="flashnorm,separate,compiled")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="file for one JSON object per line")
    arguments = parser.parse_args()
    began = time.time()
    torch._functorch.config.donated_buffer = False  # a backward is timed many times over
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    sink = open(arguments.json, "w") if arguments.json else None
    for shape in [PFFN, *SHAPES]:
        if not any(text in shape.name for text in arguments.only.split("|")):
            continue
        records = measure(shape, arguments.backends.split(","), arguments.rounds)
        records += pieces(shape, arguments.rounds) if arguments.pieces else []
        for record in records:
            print(" ".join(f"{k}={v}" for k, v in record.items()), flush=True)
            if sink:
                print(json.dumps(record), file=sink, flush=True)
        torch.cuda.empty_cache()
        print(f"{time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
