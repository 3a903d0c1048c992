"""The tolerance rule of the project: a kernel may lose at most twice what PyTorch itself loses in the same dtype.

`err(a, r)` is the larger of the relative Frobenius error and, over rows m,
`||a_m - r_m|| / max(||r_m||, median_m ||r_m||, floor)`; parameter gradients use the Frobenius part only. Required:

    err(kernel) <= 2 * min(err(unfused PyTorch, same dtype), cap) + tiny

against a reference in fp64. NaN and Inf never pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CAP = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
TINY = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
FLOOR = 1e-6  # times the norm of the terms that cancel


@dataclass(frozen=True)
class Closeness:
    """What a comparison measured. `ratio` is error / allowed: at most 1 passes."""

    name: str
    error: float
    unfused_error: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.error / self.allowed


def relative_error(actual: Tensor, reference: Tensor, *, rows: bool = True, cancelling: float = 0.0) -> float:
    """err(actual, reference) of the rule. `cancelling` is the Frobenius norm of the terms whose sum is `reference`,
    so that a result that is exactly zero is still checked, absolutely. Returns inf where `actual` is not finite."""
    if actual.shape != reference.shape:
        raise AssertionError(f"shape {tuple(actual.shape)} differs from the reference's {tuple(reference.shape)}")
    if actual.numel() == 0:
        return 0.0
    actual, reference = actual.detach().double(), reference.detach().double()
    if not torch.isfinite(actual).all():
        return math.inf
    floor = max(FLOOR * cancelling, torch.finfo(torch.float64).tiny)
    difference = actual - reference
    error = (difference.norm() / reference.norm().clamp_min(floor)).item()
    if rows and actual.dim() >= 2:
        row_norm = reference.flatten(0, -2).norm(dim=-1)
        row_floor = max(row_norm.median().item(), floor / math.sqrt(row_norm.numel()))
        by_row = difference.flatten(0, -2).norm(dim=-1) / row_norm.clamp_min(row_floor)
        error = max(error, by_row.max().item())
    return error


def check_close_to_reference(
    actual: Tensor,
    unfused: Tensor,
    reference: Tensor,
    *,
    dtype: torch.dtype | None = None,
    rows: bool = True,
    cancelling: float = 0.0,
    name: str = "output",
) -> Closeness:
    """Assert the tolerance rule for one tensor and return what was measured.

    Args:
        actual: the result under test.
        unfused: the same result from unfused PyTorch in the same dtype.
        reference: the same result in fp64.
        dtype: activation dtype of the computation (default: `actual.dtype`; name it where `actual` is an fp32 gradient
            of a bf16 computation).
        rows: also bound the error of every row; False for parameter gradients.
        cancelling: Frobenius norm of the terms that cancel in `reference`, 0 if none do.
        name: what the assertion message calls the tensor.
    Raises:
        AssertionError: with the error, PyTorch's error and the bound.
    """
    dtype = dtype or actual.dtype
    if dtype not in CAP:
        raise ValueError(f"no tolerance is defined for {dtype}; known: {', '.join(map(str, CAP))}")
    error = relative_error(actual, reference, rows=rows, cancelling=cancelling)
    unfused_error = relative_error(unfused, reference, rows=rows, cancelling=cancelling)
    allowed = 2 * min(unfused_error, CAP[dtype]) + TINY[dtype]
    result = Closeness(name, error, unfused_error, allowed)
    if not error <= allowed:
        raise AssertionError(
            f"{name}: error {error:.3e} exceeds {allowed:.3e} (unfused PyTorch in {dtype}: {unfused_error:.3e}, "
            f"shape {tuple(actual.shape)})"
        )
    return result


@dataclass(frozen=True)
class _Run:
    outputs: tuple[Tensor, ...]
    grads: dict[str, Tensor]


def _run(function: Any, tensors: dict[str, Any], options: dict[str, Any], out_grads: list[Tensor] | None) -> _Run:
    outputs = function(**tensors, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = {n: t for n, t in tensors.items() if isinstance(t, Tensor) and t.requires_grad}
    if out_grads is None or not wanted:
        return _Run(outputs, {})
    out_grads = [g.to(o.dtype) for g, o in zip(out_grads, outputs)]
    # an input that the result does not depend on has the gradient 0 here, also where autograd says None
    grads = torch.autograd.grad(outputs, list(wanted.values()), out_grads, materialize_grads=True)
    return _Run(outputs, dict(zip(wanted, grads)))


def _as_double(tensors: dict[str, Any]) -> dict[str, Any]:
    """In fp64; a tensor that is given twice (q as its own residual) stays one tensor, with the sum of both gradients."""
    made: dict[int, Tensor] = {}

    def up(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        if id(t) not in made:
            made[id(t)] = t.detach().double().requires_grad_(t.requires_grad)
        return made[id(t)]

    return {n: up(t) for n, t in tensors.items()}


PARAMETERS = frozenset(
    "weight bias norm_weight norm_bias weight1 bias1 weight2 bias2 pre_norm_weight pre_norm_bias "
    "post_norm_weight post_norm_bias".split()
)


def check_op(
    op: str,
    tensors: dict[str, Any],
    options: dict[str, Any],
    candidate: dict[str, Any],
    *,
    backward: bool = True,
    seed: int = 0,
    cancelling: dict[str, float] | None = None,
) -> list[Closeness]:
    """Run one op three times (candidate, unfused, fp64 reference) and assert the rule on outputs and gradients.

    Args:
        op: name of a public function of `recsys_norm.ops` and `recsys_norm.reference`.
        tensors: its tensor arguments by name; those with `requires_grad` get their gradients checked.
        options: its other arguments, shared by the three runs.
        candidate: arguments of the run under test only, e.g. `{"backend": "fused", "technique": "lazy"}`.
        cancelling: per tensor name, the norm of the terms that cancel in its reference gradient.
    """
    from recsys_norm import ops, reference
    from recsys_norm.ops.inputs import resolve_eps

    activation = next(t for t in tensors.values() if isinstance(t, Tensor) and t.is_floating_point())
    dtype = activation.dtype
    ref_options = dict(options)
    if "eps" in options and options["eps"] is None:
        ref_options["eps"] = resolve_eps(None, dtype)
    ref_tensors = _as_double(tensors)
    function = getattr(ops, op)
    with torch.no_grad():
        shapes = function(**tensors, **options, backend="unfused")
    shapes = shapes if isinstance(shapes, tuple) else (shapes,)
    generator = torch.Generator(device="cpu").manual_seed(seed + 7919)  # not the seed that inputs use
    out_grads = None
    if backward:
        out_grads = [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in shapes]
    with torch.autograd.set_multithreading_enabled(False):
        actual = _run(function, tensors, {**options, **candidate}, out_grads)
        unfused = _run(function, tensors, {**options, "backend": "unfused"}, out_grads)
        truth = _run(getattr(reference, op), ref_tensors, ref_options, out_grads)
    results = []
    for i, (a, u, r) in enumerate(zip(actual.outputs, unfused.outputs, truth.outputs, strict=True)):
        results.append(check_close_to_reference(a, u, r, dtype=dtype, name=f"{op} output {i}"))
    for name, grad in actual.grads.items():
        results.append(
            check_close_to_reference(
                grad,
                unfused.grads[name],
                truth.grads[name],
                dtype=dtype,
                rows=name not in PARAMETERS,
                cancelling=(cancelling or {}).get(name, 0.0),
                name=f"{op} gradient of {name}",
            )
        )
    return results
