"""The norm kernels alone against torch.compile's, on one GPU: `python benchmarks/norm_alone.py [--json FILE]`.

For each width: LayerNorm and RMSNorm with affine in bf16, forward (y and the row statistics) and backward (dx and the
parameters' gradients), M rows. Every variant is checked against fp64 before it is timed; a wrong one ends the run.
Timed launches are interleaved in random order, each after a read of a buffer larger than L2 and a pause that hides the
host, and the median is reported. Workers, one per width and norm, fill the compilers' caches first.

`--tune` times the candidate tiles below too, also of backwards that compute more, and of the bias gradient;
`kernels/norm/configs.py` holds the choice. `--inductor FILE` writes what torch.compile generates, and its tiles.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_norm.kernels.norm.configs import (
    Backward,
    Columns,
    Forward,
    backward_config,
    column_tile,
    forward_config,
    pick_tile,
)
from recsys_norm.kernels.norm.launch import column_sum, norm_backward, norm_forward
from recsys_norm.testing import check_close_to_reference, relative_error

EPS = 1e-5
COPY_BYTES_PER_S = 4.27e12  # device copy, measured on an H200
CHECKED_ROWS = 2048  # at both ends; column sums are checked over all rows
BF16 = torch.bfloat16

# (rows, warps)
FORWARD = {
    256: "4,1 8,1 2,1 8,2 4,2 16,4",
    384: "2,1 4,1 1,1 4,2 2,2 8,4",
    512: "2,1 4,1 1,1 4,2 2,2 8,4",
    1024: "1,1 2,1 2,2 1,2 4,4",
    2048: "1,2 1,1 1,4 2,2 2,4",
}
# (rows, warps, programs per multiprocessor, stages)
BACKWARD = {
    256: "2,1,16 2,1,20 4,1,12 1,1,28 2,1,16,3 4,4,6,3 4,2,8,3",
    384: "1,1,16 1,1,20 2,1,10 1,1,16,3 1,1,12,3 2,2,8,3 2,4,6,3",
    512: "1,1,16 1,1,20 2,1,10 1,1,16,3 1,1,12,3 2,2,8,3 2,4,6,3",
    1024: "1,4,6,3 1,4,7,3 1,4,8,3 1,1,8,3 1,2,8,3 1,2,6,4 1,4,6,4",
    2048: "1,4,4,3 1,4,3,3 1,4,4,4 1,4,3,4 1,8,2,3 1,2,4,3 1,8,3,4",
}
HEAVY = {
    256: "4,4,5,3 2,1,8 2,1,12 2,1,10,3 2,1,12,3 4,2,6,3",
    384: "2,4,5,3 1,1,8 1,1,12 1,1,8,3 1,1,12,3 2,2,6,3",
    512: "2,4,5,3 1,1,8 1,1,12 1,1,8,3 1,1,12,3 2,2,6,3",
    1024: "1,4,5,3 1,4,4,3 1,2,4,3 1,2,6,3 1,8,3,3 1,4,5",
    2048: "1,4,2,3 1,4,3,3 1,8,2,3 1,8,1,3 1,4,3",
}
KINDS = {"backward": "plain", "dsum": "more", "mlp": "activation"}  # as backward_config has them
# (rows, columns, warps, programs per multiprocessor, stages), at every width
COLUMNS = "16,256,4,4,3 16,256,4,8,1 16,256,4,6,3 16,256,4,3,4 8,256,2,8,3 32,256,8,2,3 8,256,4,6,3 4,256,1,16,1"


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
        if norm == "layer":  # torch's means are absolute, ours relative to the row's first element
            self.means = [x[:, 0].float() + o.mean for x, o in zip(self.x, normed)]
        else:
            self.means = self.mean
        self.compiled = {
            "forward": torch.compile(plain_forward, dynamic=False),
            "backward": torch.compile(plain_backward, dynamic=False),
        }

    def floor_ms(self, direction: str) -> float:
        passes = 2 if direction == "forward" else 3
        return passes * self.M * self.N * 2 / COPY_BYTES_PER_S * 1e3

    def ours(self, direction: str, i: int, config: Forward | Backward | None = None) -> tuple[Tensor, ...]:
        if direction == "forward":
            out = norm_forward(self.x[i], self.weight, self.bias, norm=self.norm, eps=EPS, config=config)
            return (out.y,)
        dtypes = dict(dweight=BF16, dbias=BF16 if self.norm == "layer" else None)
        tensors = (self.dy[i], self.x[i], self.mean[i], self.rstd[i], self.weight)
        g = norm_backward(*tensors, norm=self.norm, config=config, **dtypes)
        return (g.dz, g.dweight, g.dbias)[: 3 if self.norm == "layer" else 2]

    def theirs(self, direction: str, i: int) -> tuple[Tensor, ...]:
        if direction == "forward":
            return self.compiled[direction](self.norm, self.x[i], self.weight, self.bias)[:1]
        tensors = (self.dy[i], self.x[i], self.means[i], self.rstd[i], self.weight, self.bias)
        return self.compiled[direction](self.norm, *tensors)

    def heavy(self, kind: str, i: int, config: Backward) -> list[Tensor]:
        """A backward with more to do: the gradient of a returned sum, or an activation, its output and a bias below."""
        tensors = (self.dy[i], self.x[i], self.mean[i], self.rstd[i], self.weight, self.bias)
        options = dict(norm=self.norm, dweight=BF16, dbias=BF16 if self.norm == "layer" else None, config=config)
        if kind == "dsum":
            options["dsum"] = self.dy[i - 1]
        else:
            options |= dict(activation="gelu", write_h=True, dz_sum=BF16)
        return [t for t in norm_backward(*tensors, **options) if t is not None]

    def check_heavy(self, kind: str, configs: list[Backward]) -> None:
        """Every tile computes what the first does; the tests check that one."""
        first = self.heavy(kind, 0, configs[0])
        for config in configs[1:]:
            for a, b in zip(first, self.heavy(kind, 0, config), strict=True):
                error = relative_error(b[-CHECKED_ROWS:], a[-CHECKED_ROWS:], rows=False)
                if not error < 4e-3:
                    raise AssertionError(f"{self.norm} {self.N} {kind} {_label(config)} differs by {error:.1e}")

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


def shipped(direction: str, norm: str, N: int) -> Forward | Backward:
    block = pick_tile(N, (N, N), 2).block
    return forward_config(block, 2) if direction == "forward" else backward_config(block, 2, norm, KINDS[direction])


def candidates(direction: str, norm: str, N: int, tune: bool) -> list[Forward | Backward]:
    tiles = {"forward": FORWARD, "backward": BACKWARD}.get(direction, HEAVY)
    listed = tiles.get(N, "") if tune else ""
    kind = Forward if direction == "forward" else Backward
    configs = (kind(*map(int, c.split(","))) for c in listed.split())
    return list(dict.fromkeys([shipped(direction, norm, N), *configs]))


def measure(norm: str, N: int, M: int, tune: bool, rounds: int, only_warm: bool) -> list[dict]:
    records = []
    case = Case(norm, M, N)
    for direction in ("forward", "backward"):
        configs = candidates(direction, norm, N, tune)
        variants = {"compiled": lambda i, d=direction: case.theirs(d, i)}
        for config in configs:
            variants[_label(config)] = lambda i, d=direction, k=config: case.ours(d, i, k)
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
    for kind in ("dsum", "mlp") if tune else ():
        configs = candidates(kind, norm, N, tune)
        case.check_heavy(kind, configs)
        if not only_warm:
            variants = {_label(k): lambda i, k=k, kind=kind: case.heavy(kind, i, k) for k in configs}
            ms = interleaved(variants, case.sets, rounds)
            records.append(dict(norm=norm, direction=f"backward {kind}", M=M, N=N, ms=ms, shipped=_label(configs[0])))
            print(f"{norm:5} backward {kind} N={N}: {_ranked(ms)}", flush=True)
    return records


def _label(config: tuple[int, ...]) -> str:
    return "".join(f"{value}{field[0]}" for field, value in zip(config._fields, config))


def _ranked(ms: dict[str, float]) -> str:
    return "  ".join(f"{k} {v:.4f}" for k, v in sorted(ms.items(), key=lambda kv: kv[1]))


def _print(r: dict) -> None:
    mine = r["ms"][r["shipped"]]
    print(
        f"{r['norm']:5} {r['direction']:8} N={r['N']:<5} compiled {r['compiled_ms']:.4f}  shipped {mine:.4f} "
        f"({mine / r['compiled_ms']:.3f} of compiled, {r['floor_ms'] / mine:.2f} of copy speed, "
        f"error {r['error_of_allowed']:.2f} of allowed)",
        flush=True,
    )
    if len(r["ms"]) > 1:
        print("      " + _ranked(r["ms"]), flush=True)


def measure_bias(N: int, M: int, tune: bool, rounds: int, only_warm: bool) -> dict:
    """The bias gradient alone, with its error against fp64 for a gradient of mean 1."""
    dy = [torch.randn(M, N, device="cuda", dtype=BF16) + 1 for _ in range(2)]
    ones = torch.ones(1, M, device="cuda", dtype=BF16)
    variants = {"ones @ dy": lambda i: torch.mm(ones, dy[i], out_dtype=torch.float32)[0]}
    variants["torch.sum"] = lambda i: dy[i].sum(0, dtype=torch.float32)
    tiles = [column_tile(N, plain=True)]
    tiles += [Columns(*map(int, c.split(","))) for c in COLUMNS.split()] if tune else []
    for tile in dict.fromkeys(tiles):
        variants[_label(tile)] = lambda i, tile=tile: column_sum(dy[i], torch.float32, tile)
    truth = sum(part.double().sum(0) for part in dy[0].split(1 << 15))
    errors = {name: relative_error(run(0), truth, rows=False) for name, run in variants.items()}
    if max(errors.values()) > 4e-3:
        raise AssertionError(f"bias N={N}: {errors}")
    if only_warm:
        return {}
    ms = interleaved(variants, 2, rounds)
    print(f"bias  N={N}: {_ranked(ms)}", flush=True)
    print("      errors: " + "  ".join(f"{k} {v:.1e}" for k, v in errors.items()), flush=True)
    return dict(direction="bias", M=M, N=N, ms=ms, errors=errors, shipped=_label(tiles[0]))


def write_generated(path: str, widths: list[int], M: int) -> None:
    """The Python and Triton code that torch.compile generates for the peers, and the tiles it launches."""
    from torch._inductor.utils import run_and_get_code

    known: list = []
    with open(path, "w") as f, torch._inductor.config.patch(force_disable_caches=True):
        for N in widths:
            for norm in ("layer", "rms"):
                case = Case(norm, M, N)
                for direction in ("forward", "backward"):
                    _, codes = run_and_get_code(case.theirs, direction, 0)
                    f.write(f"{'#' * 100}\n# {norm} {direction} N={N}\n" + "\n".join(codes) + "\n")
                    every = [o for o in gc.get_objects() if type(o).__name__ == "CachingAutotuner"]
                    for kernel in (o for o in every if not any(o is k for k in known)):
                        f.writelines(f"# {line}\n" for line in _launched(kernel))
                    known = every


def _launched(kernel) -> list[str]:
    """What an inductor kernel launches."""
    lines = []
    for launcher in kernel.launchers:
        used = {name: getattr(launcher, name, None) for name in ("n_regs", "n_spills", "shared")}
        lines.append(f"launched: {kernel.fn.__name__}: {launcher.config} {used}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=262144)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 384, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tune", action="store_true", help="time the candidate tiles too")
    parser.add_argument("--json", help="write the records to this file")
    parser.add_argument("--inductor", metavar="FILE", help="write torch.compile's code to this file, and stop")
    parser.add_argument("--warm", choices=["layer", "rms", "bias"], help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.inductor:
        write_generated(a.inductor, a.widths, a.rows)
        return
    if a.warm == "bias":
        measure_bias(a.widths[0], a.rows, a.tune, a.rounds, only_warm=True)
    elif a.warm:
        measure(a.warm, a.widths[0], a.rows, a.tune, a.rounds, only_warm=True)
    if a.warm:
        return
    began = time.time()
    options = ["--rows", str(a.rows)] + ["--tune"] * a.tune
    jobs = [("bias", a.widths[0])] + [(norm, n) for n in a.widths for norm in ("layer", "rms")]
    command = [sys.executable, __file__, *options]
    workers = [subprocess.Popen([*command, "--warm", kind, "--widths", str(n)]) for kind, n in jobs]
    if any([w.wait() for w in workers]):
        sys.exit("a worker failed; its error is above")
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, {a.rows} rows, compiled in {time.time() - began:.0f} s", flush=True)
    records = []
    for n in a.widths:
        for norm in ("layer", "rms"):
            records += measure(norm, n, a.rows, a.tune, a.rounds, only_warm=False)
        records.append(measure_bias(n, a.rows, a.tune, a.rounds, only_warm=False))
        torch.cuda.empty_cache()
    if a.json:
        with open(a.json, "w") as f:
            json.dump(dict(gpu=gpu, torch=torch.__version__, records=records), f, indent=1)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
