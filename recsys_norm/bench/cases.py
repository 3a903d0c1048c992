"""What `bench ops` measures: one case is an op at a shape, with its tensors, baselines, bytes and FLOPs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from recsys_norm.ops import composite

GRID = [(256, 256), (384, 384), (512, 512), (512, 2048), (2048, 512), (1024, 1024), (2048, 2048)]
OPS = ("norm_linear", "linear_norm", "linear_norm_linear")


@dataclass(frozen=True)
class Case:
    """One op at one shape. For linear_norm_linear, N is the hidden width and N2 = K."""

    op: str
    norm: str
    M: int
    K: int
    N: int
    dtype: torch.dtype = torch.bfloat16
    affine: bool = True
    bias: bool = True
    residual: str | None = None
    return_sum: bool = False
    activation: str | None = None

    @property
    def N2(self) -> int:
        return self.K if self.op == "linear_norm_linear" else 0

    @property
    def normalized(self) -> int:
        """Width of the norm."""
        return self.K if self.op == "norm_linear" else self.N

    def tensors(self, seed: int = 0) -> dict[str, Tensor | None]:
        """Arguments of the op by name, on the CUDA device, all requiring gradients."""
        g = torch.Generator(device="cuda").manual_seed(seed)

        def randn(*shape, scale=1.0, mean=0.0):
            t = torch.randn(shape, device="cuda", generator=g) * scale + mean
            return t.to(self.dtype).requires_grad_()

        t: dict[str, Tensor | None] = {"x": randn(self.M, self.K, mean=0.5)}
        if self.op == "linear_norm_linear":
            t |= {"weight1": randn(self.N, self.K, scale=self.K**-0.5), "bias1": randn(self.N) if self.bias else None}
            t |= {"weight2": randn(self.N2, self.N, scale=self.N**-0.5), "bias2": randn(self.N2) if self.bias else None}
        else:
            t |= {"weight": randn(self.N, self.K, scale=self.K**-0.5), "bias": randn(self.N) if self.bias else None}
        t["norm_weight"] = randn(self.normalized, scale=0.2, mean=1.0) if self.affine else None
        t["norm_bias"] = randn(self.normalized, scale=0.2) if self.affine and self.norm == "layer" else None
        if self.residual:
            t["residual"] = randn(self.M, self.N)
        return t

    def options(self) -> dict:
        options = {"norm": self.norm}
        if self.op == "linear_norm":
            options |= {"residual_position": self.residual or "after", "return_sum": self.return_sum}
        if self.op == "linear_norm_linear":
            options["activation"] = self.activation
        return options

    def gemm_flops(self) -> int:
        """Of the forward; the backward has twice as many."""
        return 2 * self.M * self.N * (self.K + self.N2)

    def least_bytes(self, direction: str) -> int:
        """Inputs read once and outputs written once, activations and weights; statistics and vectors are left out."""
        size = torch.finfo(self.dtype).bits // 8
        x, y = self.M * self.K, self.M * (self.N2 or self.N)
        weights = self.N * (self.K + self.N2)
        extra = self.M * self.N * (bool(self.residual) + self.return_sum)
        hidden = self.M * self.N if self.N2 else 0  # z, saved by the forward and read by the backward
        forward = x + y + weights + extra + hidden
        # dy, x, and what the forward saved in; dx and the weights' gradients out
        hat = self.M * self.N if self.op == "linear_norm" else 0
        backward = y + x + hidden + hat + weights + x + weights + extra
        return size * {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def gemms(case: Case, t: dict[str, Tensor | None], direction: str) -> Callable[[], object]:
    """The op's GEMMs alone through cuBLAS, with its biases."""
    t = {n: None if v is None else v.detach() for n, v in t.items()}
    x = t["x"]
    if case.op == "linear_norm_linear":
        layers = [(x, t["weight1"], t["bias1"]), (F.linear(x, t["weight1"]), t["weight2"], t["bias2"])]
    else:
        layers = [(x, t["weight"], t["bias"])]
    grads = [torch.randn(case.M, w.shape[0], device="cuda").to(case.dtype) for _, w, _ in layers]

    def forward():
        return [F.linear(a, w, b) for a, w, b in layers]

    def backward():
        return [(dy @ w, dy.t() @ a) for (a, w, _), dy in zip(layers, grads)]

    return {"forward": forward, "backward": backward, "both": lambda: (forward(), backward())}[direction]


@functools.cache
def _compiled_norm(return_sum: bool) -> Callable:
    def norm(z, weight, bias, residual, *, norm, before):
        if residual is not None and before:
            z = z + residual
        y = composite.normalize(z, norm, weight, bias, 1e-5)
        if residual is not None and not before:
            y = y + residual
        return (y, z) if return_sum else y

    return torch.compile(norm, dynamic=False)


def compile_per_shape() -> None:
    """torch.compile as the bench wants it: each case compiled for its own sizes and kept while others are, and a backward
    that may run many times after one forward."""
    import torch._dynamo.config
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1 << 16


def norm_alone(case: Case, t: dict[str, Tensor | None], direction: str) -> Callable[[], object]:
    """torch.compile'd norm alone on a tensor of the normalised width, with the op's affine, residual and saved tensors."""
    z = torch.randn(case.M, case.normalized, device="cuda").to(case.dtype).requires_grad_()
    live = {n: t.get(n) for n in ("norm_weight", "norm_bias", "residual")}
    live = {n: None if v is None else v.detach().requires_grad_() for n, v in live.items()}
    function = _compiled_norm(case.return_sum)
    wanted = [z, *(v for v in live.values() if v is not None)]

    def forward():
        return function(z, *live.values(), norm=case.norm, before=case.residual == "before")

    outputs = forward()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn_like(o) for o in outputs]

    def backward():
        return torch.autograd.grad(outputs, wanted, grads, retain_graph=True)

    def both():
        out = forward()
        return torch.autograd.grad(out if isinstance(out, tuple) else (out,), wanted, grads)

    return {"forward": forward, "backward": backward, "both": both}[direction]
