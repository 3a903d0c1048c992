"""A training step of a model before and after `convert`: whether it computes the same, and how long it takes.

Candidates are copies of one model with the same weights: as it is and converted, each eager and through torch.compile.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from recsys_norm import conversion, ops
from recsys_norm.bench.convert_models import Kind, Size
from recsys_norm.bench.timing import percentile
from recsys_norm.testing import Closeness, check_close_to_reference

BEFORE, AFTER = "before", "after"
COMPILED = {BEFORE: "compiled before", AFTER: "compiled after"}


class GivenTables(nn.Module):
    """Stands for the tables of a model in its fp64 copy: what they looked up, in fp64."""

    def __init__(self, pooled: Tensor):
        super().__init__()
        self.pooled = pooled

    def forward(self, sparse: Any) -> GivenTables:
        return self

    def values(self) -> Tensor:
        return self.pooled


def copied(model: nn.Module, tables: nn.Module | None = None) -> nn.Module:
    """A copy that shares the embedding tables, or has other ones: those of a ranking model may be most of the memory."""
    own = getattr(model, "tables", None)
    return copy.deepcopy(model, {} if own is None else {id(own): tables or own})


class Case:
    """One model, its inputs and the cotangent of its output.

    Args:
        kind, size: of the model; `rows` per batch, by default those of the size.
        compiled: also through torch.compile.
        build: makes the model, by default the kind's.
    """

    def __init__(
        self,
        kind: Kind,
        size: Size | None = None,
        *,
        rows: int | None = None,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        compiled: bool = False,
        build: Any = None,
        **policy: Any,
    ):
        torch.manual_seed(0)
        size = size or kind.size
        model = (build or kind.build)(size)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # or a norm's weight or bias in the wrong place would not show
                    parameter.add_(0.3 * torch.randn_like(parameter))
        self.original = _moved(model, device, dtype)
        self.inputs = kind.inputs(size, rows or size.rows, device, dtype)
        self.tokens = (rows or size.rows) * size.length
        self.inputs[0].requires_grad_(kind.inner)
        converted = copied(self.original)
        self.report = conversion.convert(converted, **policy)
        self.candidates: dict[str, nn.Module] = {BEFORE: self.original, AFTER: converted}
        if compiled:
            from recsys_norm.ops import graph_passes  # imports inductor

            for name, model in list(self.candidates.items()):
                options = graph_passes.compile_options() if name == AFTER else None
                self.candidates[COMPILED[name]] = torch.compile(copied(model), dynamic=False, options=options)
        with torch.no_grad():
            y = self.original(*self.inputs)
        # Of one sign: sums over rows that cancel would show rounding alone.
        self.cotangent = 0.5 + torch.rand_like(y)
        self.target = torch.randn_like(y, dtype=torch.float32)

    def step(self, name: str) -> Tensor:
        """Forward, loss and backward."""
        model = self.candidates[name]
        model.zero_grad(set_to_none=True)
        loss = (model(*self.inputs).float() - self.target).square().mean()
        loss.backward()
        return loss

    def results(self, model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
        """Output and gradients by name."""
        wanted = {"x": inputs[0]} if inputs[0].requires_grad else {}
        wanted |= {n.removeprefix("_orig_mod."): p for n, p in model.named_parameters()}
        y = model(*inputs)
        grads = torch.autograd.grad(y, list(wanted.values()), self.cotangent.to(y.dtype), allow_unused=True)
        return {"output": y.detach()} | {n: g for n, g in zip(wanted, grads) if g is not None}

    def check(self) -> dict[str, list[Closeness]]:
        """Assert the tolerance rule on outputs and gradients of every candidate but the plain model, which it is relative
        to. Tables that train in their backward have no gradients to check."""
        reference = copied(self.original, self._tables_as_double()).double()
        first = self.inputs[0]
        inputs = (first.detach().double().requires_grad_(first.requires_grad), *self.inputs[1:])
        truth, unfused = self.results(reference, inputs), self.results(self.original, self.inputs)
        del reference
        checked = {}
        for name, model in self.candidates.items():
            if name == BEFORE:
                continue
            found = self.results(model, self.inputs)
            checked[name] = [
                check_close_to_reference(
                    value,
                    unfused[key],
                    truth[key],
                    dtype=first.dtype,
                    rows=key in ("output", "x") and value.shape[-1] > 1,  # one logit is no row
                    name=f"{name}: {key}",
                )
                for key, value in found.items()
                if key in truth
            ]
            missing = {key for key in truth if key not in found}
            assert not missing, f"{name} has no gradient of {', '.join(sorted(missing))}"
        return checked

    def _tables_as_double(self) -> nn.Module | None:
        tables = getattr(self.original, "tables", None)
        if tables is None or any(p.requires_grad and type(p) is nn.Parameter for p in _plain_tables(tables)):
            return copy.deepcopy(tables) if tables is not None else None
        with torch.no_grad():
            return GivenTables(tables(self.inputs[1]).values().double())


def _plain_tables(tables: nn.Module) -> list[nn.Parameter]:
    """Parameters of tables that autograd trains: those of nn.EmbeddingBag."""
    return [p for m in tables.modules() if isinstance(m, nn.EmbeddingBag) for p in m.parameters()]


def _moved(model: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """The model on a device, its dense part in `dtype`. Tables that train in their backward are where they belong."""
    tables = getattr(model, "tables", None)
    if tables is None or _plain_tables(tables):
        return model.to(device, dtype)
    for name, child in model.named_children():
        if name != "tables":
            child.to(device, dtype)
    model.pairs = model.pairs.to(device)
    return model


def measure(case: Case, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Times of training steps by candidate, in milliseconds: every round runs `steps` steps of each, in random order.

    ms is the wall clock per step with the device never waiting for a synchronisation inside the `steps`; gpu_ms the
    device's own time, the host far ahead; host_ms what Python and the launches take. Where host_ms is near ms, the step is
    bound by the host. peak_bytes is the memory of a step beyond what is there before it.
    """
    for name in case.candidates:
        for _ in range(3):
            case.step(name)
    torch.cuda.synchronize()
    found: dict[str, dict[str, Any]] = {name: {} for name in case.candidates}
    wall: dict[str, list[float]] = {name: [] for name in case.candidates}
    order, shuffled = list(case.candidates), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                case.step(name)
            torch.cuda.synchronize()
            wall[name].append(1e3 * (time.perf_counter() - begin) / steps)
    for name, times in wall.items():
        host, device, peak = _parts(case, name)
        found[name] = {
            "ms": round(statistics.median(times), 4),
            "ms_p20": round(percentile(times, 0.2), 4),
            "ms_p80": round(percentile(times, 0.8), 4),
            "gpu_ms": round(device, 4),
            "host_ms": round(host, 4),
            "peak_bytes": peak,
        }
    return found


def _parts(case: Case, name: str, repeats: int = 5) -> tuple[float, float, int]:
    """(milliseconds that the host needs to queue a step, milliseconds on the device, peak of the memory)."""
    hosts, devices = [], []
    case.candidates[name].zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        # asleep for twice what the host needed last time, so that the whole step is queued when the device begins
        torch.cuda._sleep(int(2 * 1.9e6 * (hosts[-1] if hosts else 10)))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        begin = time.perf_counter()
        case.step(name)
        hosts.append(1e3 * (time.perf_counter() - begin))
        end.record()
        torch.cuda.synchronize()
        devices.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() - before
    case.candidates[name].zero_grad(set_to_none=True)
    return statistics.median(hosts), statistics.median(devices), peak


def techniques_of(case: Case) -> dict[str, dict[str, int]]:
    """Which technique serves which op in one eager step of the converted model."""
    ops.reset_counts()
    case.step(AFTER)
    return ops.counts()
