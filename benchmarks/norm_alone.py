"""The norm kernels alone against torch.compile's, on one GPU: `python benchmarks/norm_alone.py [--json FILE]`.

For each width: LayerNorm and RMSNorm with affine in bf16, forward (y and the row statistics) and backward (dx and the
parameters' gradients), M rows. Every variant is checked against fp64 before it is timed; a wrong one ends the run.
Timed launches are interleaved in random order, each after a read of a buffer larger than L2 and a pause that hides the
host, and the median is reported. Workers, one per width, fill the compilers' caches first.

`--tune` times the candidate tiles below too, for LayerNorm; `kernels/norm/configs.py` holds the choice.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_norm.kernels.norm.configs import Config, backward_config, forward_config, pick_tile
from recsys_norm.kernels.norm.launch import column_sum, norm_backward, norm_forward
from recsys_norm.testing import check_close_to_reference

EPS = 1e-5
COPY_BYTES_PER_S = 4.27e12  # device copy, measured on an H200
CHECKED_ROWS = 2048  # at both ends; column sums are checked over all rows

# (rows, warps, programs per multiprocessor, stages); 0 programs: one step per program
FORWARD = {
    256: "8,4,8 8,4,0 16,4,0 16,4,6 4,4,12 4,1,28 8,2,14 8,4,6,2 4,4,8,3",
    384: "4,4,8 4,4,0 8,4,0 2,1,28 4,4,6,2 2,4,8,3",
    512: "4,4,8 4,4,0 8,4,0 2,1,28 2,4,12 4,2,12 4,4,6,2 2,4,8,3",
    1024: "1,1,16 1,1,0 2,4,8 2,4,0 4,4,0 1,2,24 1,4,12 2,4,6,2 1,4,8,3",
    2048: "1,4,8 1,4,0 2,4,0 1,2,8 1,2,0 1,8,6 1,8,0 1,4,8,2 1,4,6,3",
}
BACKWARD = {
    256: "4,4,7 4,4,6,2 4,4,6,3 8,4,4 8,4,4,2 2,2,14 1,1,28 2,1,16 2,4,8,3",
    384: "2,4,7 2,4,6,2 2,4,6,3 4,4,4 4,4,4,2 1,1,16 1,2,14",
    512: "2,4,7 2,4,6,2 2,4,6,3 4,4,4 4,4,4,2 1,1,16 1,2,14 2,8,4",
    1024: "1,4,7 1,4,6,2 1,4,6,3 2,4,4 2,4,4,2 1,2,8 1,8,4 2,8,3 2,8,3,2",
    2048: "1,4,4 1,4,4,2 1,4,4,3 1,8,3 1,8,3,2 1,8,3,3 2,8,2 1,16,1 1,4,3",
}


def reference(norm: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def plain_forward(norm: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """What torch.compile gets: y and the statistics that a backward needs."""
    if norm == "layer":
        return torch.native_layer_norm(x, x.shape[-1:], weight, bias, EPS)
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (wide * rstd * weight.float()).to(x.dtype), rstd


def plain_backward(norm: str, dy: Tensor, x: Tensor, mean, rstd: Tensor, weight: Tensor, bias) -> tuple[Tensor, ...]:
    if norm == "layer":
        statistics = mean[:, None], rstd[:, None]
        everything = [True, True, True]
        return torch.ops.aten.native_layer_norm_backward(dy, x, x.shape[-1:], *statistics, weight, bias, everything)
    hat = x.float() * rstd[:, None]
    t = dy.float() * weight.float()
    dx = rstd[:, None] * (t - hat * (t * hat).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * hat).sum(0).to(weight.dtype)


class Case:
    """One width and norm: inputs in `sets` copies, so that no launch finds its rows in L2."""

    def __init__(self, norm: str, M: int, N: int, seed: int = 0):
        torch.manual_seed(seed)
        torch._dynamo.reset()  # or the limit on recompilations of one function turns the peer into eager code
        self.norm, self.M, self.N = norm, M, N
        self.sets = 3 if N <= 512 else 2

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.x = [randn(M, N) for _ in range(self.sets)]
        self.dy = [randn(M, N) for _ in range(self.sets)]
        self.weight, self.bias = randn(N), randn(N) if norm == "layer" else None
        normed = [norm_forward(x, self.weight, self.bias, norm=norm, eps=EPS) for x in self.x]
        self.mean, self.rstd = [o.mean for o in normed], [o.rstd for o in normed]
        self.compiled = {
            "forward": torch.compile(plain_forward, dynamic=False),
            "backward": torch.compile(plain_backward, dynamic=False),
        }

    def floor_ms(self, direction: str) -> float:
        passes = 2 if direction == "forward" else 3
        return passes * self.M * self.N * 2 / COPY_BYTES_PER_S * 1e3

    def ours(self, direction: str, i: int, config: Config | None = None) -> tuple[Tensor, ...]:
        if direction == "forward":
            out = norm_forward(self.x[i], self.weight, self.bias, norm=self.norm, eps=EPS, config=config)
            return (out.y,)
        dtypes = dict(dweight=torch.bfloat16, dbias=torch.bfloat16 if self.norm == "layer" else None)
        tensors = (self.dy[i], self.x[i], self.mean[i], self.rstd[i], self.weight)
        g = norm_backward(*tensors, norm=self.norm, config=config, **dtypes)
        return (g.dz, g.dweight, g.dbias)[: 3 if self.norm == "layer" else 2]

    def theirs(self, direction: str, i: int) -> tuple[Tensor, ...]:
        if direction == "forward":
            return self.compiled[direction](self.norm, self.x[i], self.weight, self.bias)[:1]
        tensors = (self.dy[i], self.x[i], self.mean[i], self.rstd[i], self.weight, self.bias)
        return self.compiled[direction](self.norm, *tensors)

    def truth(self, direction: str, dtype: torch.dtype) -> list[Tensor]:
        """Of set 0, rows at both ends and whole column sums, by autograd in `dtype`."""
        ends = torch.cat([torch.arange(CHECKED_ROWS), torch.arange(self.M - CHECKED_ROWS, self.M)]).cuda()
        if direction == "forward":
            bias = None if self.bias is None else self.bias.to(dtype)
            return [reference(self.norm, self.x[0][ends].to(dtype), self.weight.to(dtype), bias)]
        leaves = [t.to(dtype) for t in (self.weight, self.bias) if t is not None]
        leaves = [t.requires_grad_() for t in leaves]
        rows = []
        for x, dy in zip(self.x[0].split(1 << 15), self.dy[0].split(1 << 15)):
            x = x.to(dtype).requires_grad_()
            reference(self.norm, x, *leaves, *(None,) * (2 - len(leaves))).backward(dy.to(dtype))
            rows.append(x.grad)
        dx = torch.cat([rows[0][:CHECKED_ROWS], rows[-1][-CHECKED_ROWS:]])
        return [dx, *(t.grad for t in leaves)]

    def check(self, direction: str, variants: dict[str, Callable]) -> float:
        """The worst error / allowed over variants; raises where one exceeds 1."""
        exact, unfused = self.truth(direction, torch.float64), self.truth(direction, torch.bfloat16)
        worst = 0.0
        for name, run in variants.items():
            first, *columns = run(0)
            got = [torch.cat([first[:CHECKED_ROWS], first[-CHECKED_ROWS:]]), *columns]
            for a, u, r in zip(got, unfused, exact, strict=True):
                label = f"{self.norm} {self.N} {direction} {name}"
                worst = max(worst, check_close_to_reference(a, u, r, rows=a.dim() == 2, name=label).ratio)
        return worst


def interleaved(variants: dict[str, Callable[[int], object]], sets: int, rounds: int) -> dict[str, float]:
    """Median milliseconds per variant, each launch after a read of 256 MB and a pause longer than the host needs."""
    flush = torch.zeros(64 << 20, device="cuda")
    times: dict[str, list] = {name: [] for name in variants}
    order = list(variants)
    for n in range(rounds + 2):
        random.shuffle(order)
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.max()
            torch.cuda._sleep(400_000)
            start.record()
            variants[name](n % sets)
            end.record()
            if n >= 2:
                times[name].append((start, end))
        torch.cuda.synchronize()
    return {k: torch.tensor([a.elapsed_time(b) for a, b in v]).median().item() for k, v in times.items()}


def shipped(direction: str, N: int) -> Config:
    block = pick_tile(N, (N, N), 2).block
    return forward_config(block, 2) if direction == "forward" else backward_config(block, 2, False)


def candidates(direction: str, N: int, tune: bool) -> list[Config]:
    listed = {"forward": FORWARD, "backward": BACKWARD}[direction].get(N, "") if tune else ""
    configs = (Config(*map(int, c.split(","))) for c in listed.split())
    return list(dict.fromkeys([shipped(direction, N), *configs]))


def measure(N: int, M: int, tune: bool, rounds: int, only_warm: bool) -> list[dict]:
    records = []
    for norm in ("layer", "rms"):
        case = Case(norm, M, N)
        for direction in ("forward", "backward"):
            configs = candidates(direction, N, tune and norm == "layer")
            variants = {"compiled": lambda i, d=direction, c=case: c.theirs(d, i)}
            for config in configs:
                variants[_label(config)] = lambda i, d=direction, c=case, k=config: c.ours(d, i, k)
            if only_warm:
                for run in variants.values():
                    run(0)
                continue
            ratio = case.check(direction, variants)
            ms = interleaved(variants, case.sets, rounds)
            record = dict(norm=norm, direction=direction, M=M, N=N, compiled_ms=ms.pop("compiled"), ms=ms)
            record |= dict(shipped=_label(configs[0]), floor_ms=case.floor_ms(direction), error_of_allowed=ratio)
            records.append(record)
            _print(record)
        del case, variants
        torch.cuda.empty_cache()
    return records


def _label(config: Config) -> str:
    return f"{config.rows}r{config.warps}w{config.per_sm}p{config.stages}s"


def _print(r: dict) -> None:
    mine = r["ms"][r["shipped"]]
    best = sorted(r["ms"].items(), key=lambda kv: kv[1])
    print(
        f"{r['norm']:5} {r['direction']:8} N={r['N']:<5} compiled {r['compiled_ms']:.4f}  shipped {mine:.4f} "
        f"({mine / r['compiled_ms']:.3f} of compiled, {r['floor_ms'] / mine:.2f} of copy speed, "
        f"error {r['error_of_allowed']:.2f} of allowed)",
        flush=True,
    )
    if len(best) > 1:
        print("      " + "  ".join(f"{k} {v:.4f}" for k, v in best), flush=True)


def other_parts(N: int, M: int) -> dict[str, Callable[[int], object]]:
    """Alternatives for the bias gradient and for the weight gradient's precision."""
    dy = [torch.randn(M, N, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    x = [torch.randn(M, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    ones = torch.ones(1, M, device="cuda", dtype=torch.bfloat16)
    return {
        "bias: column_sum": lambda i: column_sum(dy[i], torch.bfloat16),
        "bias: sum(0) in fp32": lambda i: dy[i].sum(0, dtype=torch.float32),
        "bias: ones @ dy": lambda i: torch.mm(ones, dy[i]),
        "weight: dy^T x to bf16": lambda i: torch.mm(dy[i].t(), x[i]),
        "weight: dy^T x to fp32": lambda i: torch.mm(dy[i].t(), x[i], out_dtype=torch.float32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=262144)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 384, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tune", action="store_true", help="time the candidate tiles too")
    parser.add_argument("--json", help="write the records to this file")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.warm:
        measure(a.widths[0], a.rows, a.tune, a.rounds, only_warm=True)
        return
    began = time.time()
    options = ["--warm", "--rows", str(a.rows)] + ["--tune"] * a.tune
    workers = [subprocess.Popen([sys.executable, __file__, *options, "--widths", str(n)]) for n in a.widths]
    if any(w.wait() for w in workers):
        sys.exit("a worker failed; its error is above")
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, {a.rows} rows, compiled in {time.time() - began:.0f} s", flush=True)
    records = [r for n in a.widths for r in measure(n, a.rows, a.tune, a.rounds, only_warm=False)]
    for n in a.widths:
        ms = interleaved(other_parts(n, a.rows), 2, a.rounds)
        print(f"N={n}: " + "  ".join(f"{k} {v:.4f}" for k, v in ms.items()), flush=True)
    if a.json:
        with open(a.json, "w") as f:
            json.dump(dict(gpu=gpu, torch=torch.__version__, records=records), f, indent=1)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
