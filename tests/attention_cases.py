"""Packed attention problems, their fp64 truth and their check, for the tests of every path."""

import itertools
from dataclasses import dataclass, field

import torch

from recsys_norm.ops import jagged_attention
from recsys_norm.reference import attention_one
from recsys_norm.testing import check_close_to_reference


@dataclass
class Problem:
    """Packed q, k, v with `slack` NaN rows past the last sequence, and what to compute on them."""

    q_len: list[int]
    k_len: list[int]
    heads: int = 2
    d: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    slack: int = 0
    offsets_dtype: torch.dtype = torch.int32
    options: dict = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)
        T, U = sum(self.q_len), sum(self.k_len)

        def packed(rows, size):
            x = torch.full((rows + self.slack, self.heads, self.d), float("nan"))
            x[:rows] = size * torch.randn(rows, self.heads, self.d, generator=g)
            return x.to(self.device, self.dtype)

        self.q, self.k, self.v = packed(T, 1.0), packed(U, 2.0 * self.d**-0.5), packed(U, 1.0)
        self.grad = packed(T, 1.0)
        self.q_offsets, self.k_offsets = (
            torch.tensor([0, *itertools.accumulate(n)], dtype=self.offsets_dtype, device=self.device)
            for n in (self.q_len, self.k_len)
        )

    @property
    def lengths(self):
        return dict(max_q_len=max([1, *self.q_len]), max_k_len=max([1, *self.k_len]))

    @property
    def arguments(self):
        return (self.q, self.k, self.v, self.q_offsets, self.k_offsets)

    def run(self, **more):
        """(o, dq, dk, dv) through the public function and autograd."""
        q, k, v = (t.detach().requires_grad_() for t in (self.q, self.k, self.v))
        o = jagged_attention(q, k, v, self.q_offsets, self.k_offsets, **self.lengths, **(self.options | more))
        return (o.detach(), *torch.autograd.grad(o, (q, k, v), self.grad))


def loop(p: Problem, dtype: torch.dtype = torch.float64):
    """(o, dq, dk, dv) by plain PyTorch, one sequence at a time, every step in `dtype`; rows past the last sequence are 0."""
    options = dict(activation="gelu", softmax=False, scale=None, causal=False, window=None) | p.options
    activation, scale = options.pop("activation"), options.pop("scale")
    names = (activation,) if isinstance(activation, str) else tuple(activation)
    if scale is None:
        scale = p.d**-0.5 if options["softmax"] else 1.0
    q, k, v = (t.to(dtype).nan_to_num().requires_grad_() for t in (p.q, p.k, p.v))
    q_ends, k_ends = (list(itertools.accumulate(n)) for n in (p.q_len, p.k_len))
    rows = []
    for ql, kl, qe, ke in zip(p.q_len, p.k_len, q_ends, k_ends):
        one = (q[qe - ql : qe], k[ke - kl : ke], v[ke - kl : ke])
        rows.append(attention_one(*one, activations=names, scale=scale, **options))
    o = torch.cat([*rows, q.new_zeros(p.q.shape[0] - sum(p.q_len), p.heads, p.d)])
    if not o.requires_grad:
        return o, *(torch.zeros_like(t) for t in (q, k, v))
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), p.grad.to(dtype).nan_to_num()))


def check(p: Problem, actual):
    """Assert the tolerance rule for (o, dq, dk, dv) against fp64; returns the worst error / allowed."""
    expected, unfused = loop(p), loop(p, p.dtype)
    worst = 0.0
    for name, a, u, e in zip(("o", "dq", "dk", "dv"), actual, unfused, expected, strict=True):
        assert a.dtype == p.dtype and a.shape == e.shape, name
        rows = sum(p.q_len if name in ("o", "dq") else p.k_len)
        assert not a[rows:].any(), f"{name}: rows past the last sequence are not 0"
        if rows and e.any():
            result = check_close_to_reference(a[:rows], u[:rows], e[:rows], dtype=p.dtype, name=name)
            worst = max(worst, result.ratio)
        elif rows and p.options.get("softmax") and p.device == "cuda":
            # Softmax over one key has no slope; flash attention subtracts two roundings of the same number.
            assert a.abs().max() < 2e-2, name
        else:
            assert not a.any(), f"{name} is not exactly 0"
    return worst


LENGTHS = {
    "ragged": ([3, 17, 5], [4, 2, 9]),
    "empty first": ([0, 0, 5, 4], [0, 3, 6, 2]),
    "empty middle": ([5, 0, 4], [3, 7, 2]),
    "empty last": ([5, 4, 0], [3, 2, 4]),
    "no queries": ([0, 0], [3, 2]),
    "no keys": ([3, 2], [0, 0]),
    "keys missing somewhere": ([3, 2, 6], [4, 0, 2]),
    "length one": ([1, 1, 1], [1, 1, 1]),
    "nothing": ([0, 0], [0, 0]),
    "one sequence": ([21], [13]),
}


def check_slices(p: Problem, run) -> None:
    """Slices of one projection give the bits that q, k and v give by themselves. run(problem): a tuple of tensors."""
    expected = run(p)
    p.q, p.k, p.v = torch.stack([p.q, p.k, p.v], 1).unbind(1)
    for actual, right in zip(run(p), expected, strict=True):
        assert torch.equal(actual, right)
