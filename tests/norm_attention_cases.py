"""Arguments of `norm_attention` for the tests of its techniques."""

import itertools

import torch

from recsys_norm import ops
from recsys_norm.testing import relative_error

LENGTHS = {
    "ragged": ([3, 1, 5], [2, 4, 1]),
    "empty first": ([0, 0, 5, 4], [2, 3, 0, 4]),
    "empty middle": ([3, 0, 4], [2, 3, 4]),
    "empty last": ([4, 0], [3, 5]),
    "all queries empty": ([0, 0], [3, 2]),
    "all keys empty": ([3, 2], [0, 0]),
    "length one": ([1, 1, 1], [1, 1, 1]),
    "long": ([130, 0, 77, 300], [64, 5, 0, 90]),
}


def arguments(lengths="ragged", *, H=2, d=8, dtype=torch.float32, param_dtype=None, pre=None, post=None, on="q",
              scope="all_heads", affine=True, residual=False, slack=0, device="cpu", seed=0):  # fmt: skip
    """(tensors, options): tensors by name, all that can with requires_grad; `slack` rows past the last offset."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape, mean=0.0, dtype=param_dtype or dtype):
        return (torch.randn(shape, generator=g) + mean).to(device, dtype).requires_grad_()

    q_len, k_len = LENGTHS[lengths] if isinstance(lengths, str) else lengths
    T, U = sum(q_len) + slack, sum(k_len) + slack
    t = {"q_THd": randn(T, H, d, mean=0.5, dtype=dtype)}
    t["k_UHd"], t["v_UHd"] = (randn(U, H, d, dtype=dtype) for _ in range(2))
    for name, n in (("q_offsets_B1", q_len), ("k_offsets_B1", k_len)):
        t[name] = torch.tensor([0, *itertools.accumulate(n)], device=device)
    width = d if scope == "head" else H * d
    for side, norm, w in (("pre", pre, width), ("post", post, H * d)):
        if norm and affine:
            t[f"{side}_norm_weight"] = randn(w, mean=1.0)
            if norm == "layer":
                t[f"{side}_norm_bias"] = randn(w)
    if residual:
        t["residual"] = randn(T, H, d, dtype=dtype)
    options = dict(max_q_len=max(*q_len, 1), max_k_len=max(*k_len, 1), pre_norm=pre, post_norm=post)
    return t, options | dict(pre_norm_scope=scope, pre_norm_on=on, scale=d**-0.5)


def check_slack(tensors, options, candidate, slack, limit):
    """NaN in the last `slack` rows of every input reaches neither the output nor a gradient, and their own are 0."""
    rows = [n for n, v in tensors.items() if v.dim() == 3]
    with torch.no_grad():
        for name in rows:
            tensors[name][-slack:] = float("nan")
    wanted = {n: v for n, v in tensors.items() if v.requires_grad}

    def run(inputs, dy, **policy):
        y = ops.norm_attention(**inputs, **options, **policy)
        dy = torch.full_like(y, float("nan")) if dy is None else dy
        return y.detach(), dict(zip(wanted, torch.autograd.grad(y, [inputs[n] for n in wanted], dy)))

    dy = torch.randn(tensors["q_THd"].shape, generator=torch.Generator().manual_seed(1)).to(tensors["q_THd"])
    dy[-slack:] = float("nan")
    y, grads = run(tensors, dy, **candidate)
    cut = {n: v.detach()[:-slack].requires_grad_() if n in rows else v for n, v in tensors.items()}
    expected, right = run(cut, dy[:-slack], backend="unfused")
    for name, a, b in [("output", y, expected), *((n, grads[n], right[n]) for n in wanted)]:
        if a.dim() == 3:
            assert not a[-slack:].any(), f"{name}: rows past the last offset are not 0"
            a = a[:-slack]
        assert relative_error(a, b, rows=False, cancelling=1.0) <= limit, name


def check_own_residual(tensors, options, candidate, limit):
    """With q as its own residual the gradient of q is that of q and of a copy of it as the residual, and nothing else
    changes."""
    leaves = {n: v.detach().requires_grad_(v.requires_grad) for n, v in tensors.items()}
    wanted = [v for v in leaves.values() if v.requires_grad]
    dy = torch.randn(leaves["q_THd"].shape, generator=torch.Generator().manual_seed(1)).to(leaves["q_THd"])
    copy = leaves["q_THd"].detach().clone().requires_grad_()

    def run(residual):
        y = ops.norm_attention(**leaves, residual=residual, **options, **candidate)
        return y.detach(), torch.autograd.grad(y, [*wanted, *([copy] if residual is copy else [])], dy)

    (y, grads), (y_apart, (dq, *apart, dresidual)) = run(leaves["q_THd"]), run(copy)
    assert torch.equal(y, y_apart)
    assert relative_error(grads[0], dq.double() + dresidual.double()) <= limit
    for a, b in zip(grads[1:], apart):
        assert relative_error(a, b, rows=False, cancelling=1.0) <= limit
