"""Attention over packed sequences of different lengths, with an element-wise activation (GDPA) or softmax.

    o_h = act(scale * q_h k_h^T) v_h          per sequence and head, no softmax (default)
    o_h = softmax(scale * q_h k_h^T) v_h      softmax=True

GDPA is the generalized dot-product attention of the Kunlun architecture ("Towards Free Normalization", 2026).
Registered ops: recsys_norm::gdpa, recsys_norm::jagged_softmax and their backwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from recsys_norm.ops import jagged_torch
from recsys_norm.ops.activations import get, head_runs, resolve
from recsys_norm.ops.inputs import autocast, in_a_row
from recsys_norm.ops.jagged_torch import Attention
from recsys_norm.ops.operators import define

IMPLEMENTATIONS = ("auto", "eager")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FLASH_WIDTH = 256


def jagged_attention(
    q_THd: Tensor,
    k_UHd: Tensor,
    v_UHd: Tensor,
    q_offsets_B1: Tensor,
    k_offsets_B1: Tensor,
    *,
    max_q_len: int,
    max_k_len: int,
    activation: str | Sequence[str] = "gelu",
    softmax: bool = False,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Attention of packed queries [T, H, d] to packed keys and values [U, H, d]; returns [T, H, d].

    Sequence b has queries q_offsets[b]:q_offsets[b+1] and keys k_offsets[b]:k_offsets[b+1]; either side may be empty. A
    query without keys gives 0, keys without queries get zero gradients. Rows past the last offset are 0 in the output
    and in the gradients, whatever they hold. Scores and sums are fp32 for bf16 and fp16 tensors.

    Positions i of queries and j of keys count from the start of their sequence. `causal` keeps j <= i; `window=w` keeps
    |i - j| < w, so both keep i - w < j <= i: `window_size=(w-1, 0)` of torch.nn.attention.varlen, (w-1, w-1) without
    causal. That function aligns the sequences' ends instead, which is the same where both sides are equally long.

    Args:
        q_THd, k_UHd, v_UHd: one of bf16, fp16, fp32 (fp64 on the CPU); slices of a fused projection need no copy. Under
            autocast they are cast to its dtype.
        q_offsets_B1, k_offsets_B1: int32 or int64 [B+1] on the same device, starting at 0, non-decreasing.
        max_q_len, max_k_len: at least the longest sequence of each side. Checked on the CPU only; elsewhere values for
            longer sequences are undefined, and nothing outside the tensors is read or written.
        activation: a name of recsys_norm.ops.activations, or one per head. Not used with softmax.
        scale: inside the activation; None is 1 for GDPA and d**-0.5 for softmax.
        implementation: "auto": on CUDA the project's Triton kernels for GDPA; for softmax torch's variable-length flash
            attention or, where they were measured to be faster, kernels of the project; on the CPU PyTorch. Softmax in
            fp32, with d not a multiple of 8 or above 256, or causal or windowed between different offset tensors, has no
            flash kernel and runs as "eager".
            "eager": padded PyTorch on every device, open to autograd and torch.compile (any order of derivative).
    Raises:
        TypeError: dtypes that differ or are not supported. ValueError: shapes, devices, offsets, unknown names.

    Deterministic, except the gradients of flash attention, which need torch.use_deterministic_algorithms(True).
    """
    q_THd, k_UHd, v_UHd = autocast(q_THd, k_UHd, v_UHd)
    _check(q_THd, k_UHd, v_UHd, q_offsets_B1, k_offsets_B1, max_q_len, max_k_len, window, implementation)
    q_offsets_B1, k_offsets_B1 = in_a_row(q_offsets_B1, k_offsets_B1)
    heads, d = q_THd.shape[1:]
    if scale is None:
        scale = d**-0.5 if softmax else 1.0
    names = None if softmax else resolve(activation, heads)
    tensors = (q_THd, k_UHd, v_UHd, q_offsets_B1, k_offsets_B1)
    lengths = (max_q_len, max_k_len)
    if implementation == "eager" or (softmax and q_THd.is_cuda and not _has_flash(tensors, causal, window)):
        return jagged_torch.eager(*tensors, *lengths, Attention(names, scale, causal, window))
    if names is None:
        return torch.ops.recsys_norm.jagged_softmax(*tensors, *lengths, scale, causal, window)[0]
    return torch.ops.recsys_norm.gdpa(*tensors, *lengths, ",".join(names), scale, causal, window)


def _check(q, k, v, q_offsets, k_offsets, max_q_len, max_k_len, window, implementation) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"jagged_attention: implementation={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise ValueError(f"jagged_attention: {name} needs shape [rows, heads, d], got {tuple(tensor.shape)}")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"jagged_attention: {name} is {tensor.dtype}; use bfloat16, float16 or float32")
        if tensor.dtype != q.dtype:
            raise TypeError(f"jagged_attention: {name} is {tensor.dtype} where q is {q.dtype}; cast one with .to()")
    if k.shape != v.shape or k.shape[1:] != q.shape[1:]:
        raise ValueError(
            f"jagged_attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} need the same heads and d, "
            "and k and v the same rows"
        )
    if q.dtype == torch.float64 and q.is_cuda and implementation == "auto":
        raise TypeError("jagged_attention: the CUDA kernels have no float64; use implementation='eager'")
    for name, offsets in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        if offsets.dim() != 1 or offsets.shape[0] == 0 or offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"jagged_attention: {name} needs shape [B+1] and dtype int32 or int64, got {tuple(offsets.shape)} "
                f"{offsets.dtype}"
            )
        if offsets.device != q.device:
            raise ValueError(
                f"jagged_attention: {name} is on {offsets.device} and q on {q.device}; move one with .to()"
            )
    if q_offsets.shape != k_offsets.shape:
        raise ValueError(
            f"jagged_attention: q_offsets has {q_offsets.shape[0] - 1} sequences and k_offsets {k_offsets.shape[0] - 1}"
        )
    if window is not None and window < 1:
        raise ValueError(
            f"jagged_attention: window={window} keeps no key; it must be at least 1, or None for no window"
        )
    if max_q_len < 0 or max_k_len < 0:
        raise ValueError(f"jagged_attention: max_q_len={max_q_len} and max_k_len={max_k_len} must not be negative")
    if q.device.type == "cpu" and implementation == "eager" and not torch.compiler.is_compiling():
        _check_lengths(q, k, q_offsets, k_offsets, max_q_len, max_k_len)


def _check_lengths(q, k, q_offsets, k_offsets, max_q_len, max_k_len) -> None:
    jagged_torch.check_lengths("q", q_offsets, q.shape[0], max_q_len)
    jagged_torch.check_lengths("k", k_offsets, k.shape[0], max_k_len)


def _has_flash(tensors: tuple[Tensor, ...], causal: bool, window: int | None) -> bool:
    q, _, _, q_offsets, k_offsets = tensors
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] % 8 or q.shape[2] > _FLASH_WIDTH:
        return False
    return q_offsets is k_offsets or not (causal or window is not None)


def _unit_stride(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t if t.stride(2) == 1 or t.shape[2] == 1 else t.contiguous() for t in tensors)


def _flash_ready(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Flash attention reads 16 bytes at a time, wherever a tensor starts: one whose rows do not start there is copied."""
    vector = 16 // tensors[0].element_size()
    fits = (t.data_ptr() % 16 == 0 and all(s % vector == 0 for s in t.stride()[:2]) for t in tensors)
    return tuple(t if ready else t.clone(memory_format=torch.contiguous_format) for t, ready in zip(tensors, fits))


# ----------------------------------------------------------------------------------------------------------------- GDPA


def _launch_spec(heads: int, max_q_len, max_k_len, activation, scale, causal, window):
    """For the kernels; activation None is softmax."""
    from recsys_norm.kernels.gdpa.launch import Spec

    names = [] if activation is None else head_runs(activation.split(","), heads)
    runs = [(first, end, get(name).code) for first, end, name in names]
    reach = None if window is None else window - 1
    return Spec(max_q_len, max_k_len, runs, scale, left=reach, right=0 if causal else reach)


@define("gdpa")
def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q_len: int,
    max_k_len: int,
    activation: str,
    scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """`activation` is a name, or one per head, joined by commas."""
    if not q.is_cuda:
        _check_lengths(q, k, q_offsets, k_offsets, max_q_len, max_k_len)
        attention = Attention(tuple(activation.split(",")), scale, causal, window)
        return jagged_torch.grouped_forward(q, k, v, q_offsets, k_offsets, attention)
    from recsys_norm.kernels.gdpa import launch

    spec = _launch_spec(q.shape[1], max_q_len, max_k_len, activation, scale, causal, window)
    return launch.forward(*_unit_stride(q, k, v), q_offsets, k_offsets, spec)


@gdpa.register_fake
def _gdpa_fake(q, k, v, q_offsets, k_offsets, max_q_len, max_k_len, activation, scale, causal, window):
    return q.new_empty(q.shape)


@define("gdpa_backward")
def gdpa_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q_len: int,
    max_k_len: int,
    activation: str,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `gdpa`."""
    if not q.is_cuda:
        attention = Attention(tuple(activation.split(",")), scale, causal, window)
        return jagged_torch.grouped_backward(grad, q, k, v, q_offsets, k_offsets, attention)
    from recsys_norm.kernels.gdpa import launch

    spec = _launch_spec(q.shape[1], max_q_len, max_k_len, activation, scale, causal, window)
    return launch.backward(*_unit_stride(grad, q, k, v), q_offsets, k_offsets, spec)


@gdpa_backward.register_fake
def _gdpa_backward_fake(grad, q, k, v, *args):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _gdpa_save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _gdpa_grad(ctx, grad):
    grads = torch.ops.recsys_norm.gdpa_backward(grad, *ctx.saved_tensors, *ctx.options)
    return _needed(ctx, grads)


def _needed(ctx, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    return (*(g if need else None for g, need in zip(grads, ctx.needs_input_grad)), None, None)  # none for the offsets


gdpa.register_autograd(_gdpa_grad, setup_context=_gdpa_save)


# -------------------------------------------------------------------------------------------------------------- softmax


def _flash_options(scale: float, causal: bool, window: int | None) -> dict:
    reach = -1 if window is None else window - 1
    return {"scale": scale, "window_size_left": reach, "window_size_right": 0 if causal else reach}


def _flash_offsets(*offsets: Tensor) -> tuple[Tensor, ...]:
    return tuple(o.to(torch.int32) for o in offsets)


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    return (q.shape[1], q.shape[0]) if q.is_cuda else (0,)  # the CPU computes the weights again


@define("jagged_softmax")
def jagged_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q_len: int,
    max_k_len: int,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp [H, T] in fp32 on CUDA, empty on the CPU)."""
    if not q.is_cuda:
        _check_lengths(q, k, q_offsets, k_offsets, max_q_len, max_k_len)
        attention = Attention(None, scale, causal, window)
        out = jagged_torch.grouped_forward(q, k, v, q_offsets, k_offsets, attention)
        return out, torch.zeros(_lse_shape(q), dtype=torch.float32, device=q.device)
    if q.numel() == 0 or k.numel() == 0 or q_offsets.numel() == 1:
        lse = torch.zeros(_lse_shape(q), dtype=torch.float32, device=q.device)
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), lse
    from recsys_norm.kernels.gdpa.launch import zero_slack
    from recsys_norm.kernels.softmax import launch

    q, k, v = _unit_stride(q, k, v)
    spec = _launch_spec(q.shape[1], max_q_len, max_k_len, None, scale, causal, window)
    if launch.serves(q, k, v, spec):
        return launch.forward(q, k, v, q_offsets, k_offsets, spec)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_flash_ready(q, k, v), *_flash_offsets(q_offsets, k_offsets), max_q_len, max_k_len, 0.0,
        causal and window is None, False, **_flash_options(scale, causal, window),
    )  # fmt: skip
    out = out.contiguous()
    zero_slack(out, q_offsets)
    return out, lse


@jagged_softmax.register_fake
def _jagged_softmax_fake(q, k, v, q_offsets, k_offsets, max_q_len, max_k_len, scale, causal, window):
    return q.new_empty(q.shape), q.new_empty(_lse_shape(q), dtype=torch.float32)


@define("jagged_softmax_backward")
def jagged_softmax_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    out: Tensor,
    lse: Tensor,
    max_q_len: int,
    max_k_len: int,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `jagged_softmax`."""
    if not q.is_cuda:
        attention = Attention(None, scale, causal, window)
        return jagged_torch.grouped_backward(grad, q, k, v, q_offsets, k_offsets, attention)
    if q.numel() == 0 or k.numel() == 0 or q_offsets.numel() == 1:
        dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        return dq, dk, dv
    from recsys_norm.kernels.gdpa import launch
    from recsys_norm.kernels.softmax import launch as softmax

    grad, q, k, v = _unit_stride(grad, q, k, v)
    spec = _launch_spec(q.shape[1], max_q_len, max_k_len, None, scale, causal, window)
    if softmax.serves_few_queries(q, q_offsets.numel() - 1, spec):
        return softmax.few_queries(grad, q, k, v, *_unit_stride(out), lse, q_offsets, k_offsets, spec)
    if softmax.serves_causal(q, q_offsets, k_offsets, spec):
        return softmax.causal_backward(grad, q, k, v, *_unit_stride(out), lse, q_offsets, spec)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        *_flash_ready(grad, q, k, v, out), lse, *_flash_offsets(q_offsets, k_offsets), max_q_len, max_k_len, 0.0,
        causal and window is None, no_dropout, torch.empty(0, device=q.device), **_flash_options(scale, causal, window),
    )  # fmt: skip
    dq, dk, dv = (g.contiguous() for g in grads)
    launch.zero_slack(dq, q_offsets)
    launch.zero_slack(dk, k_offsets)
    launch.zero_slack(dv, k_offsets)
    return dq, dk, dv


@jagged_softmax_backward.register_fake
def _jagged_softmax_backward_fake(grad, q, k, v, *args):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _softmax_save(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.options = inputs[5:]


def _softmax_grad(ctx, grad, _):
    saved = ctx.saved_tensors
    grad = torch.zeros_like(saved[5]) if grad is None else grad
    grads = torch.ops.recsys_norm.jagged_softmax_backward(grad, *saved, *ctx.options)
    return _needed(ctx, grads)


jagged_softmax.register_autograd(_softmax_grad, setup_context=_softmax_save)


# ---------------------------------------------------------------------------------------------------------------- FLOPs


def attention_pairs(q_offsets_B1: Tensor, k_offsets_B1: Tensor, causal: bool, window: int | None) -> int:
    """Number of (query, key) pairs that attend, over all sequences. Reads the offsets on the host."""
    queries, keys = q_offsets_B1.diff().cpu(), k_offsets_B1.diff().cpu()
    if not causal and window is None:
        return int((queries * keys).sum())
    i = torch.arange(int(queries.max()) if queries.numel() else 0)
    reach = int(keys.max()) + len(i) if window is None and keys.numel() else window or 1
    end = torch.minimum(i + (1 if causal else reach), keys[:, None])
    count = (end - (i - reach + 1).clamp(min=0)).clamp(min=0)
    return int((count * (i < queries[:, None])).sum())


def _product_flops(q: Tensor, k: Tensor, q_offsets, k_offsets, max_k_len: int, causal: bool, window: int | None) -> int:
    """Of one product over the attending pairs; where the offsets have no values (tracing), over q times max_k_len."""
    if q.is_meta or isinstance(q_offsets, torch._subclasses.FakeTensor):
        pairs = q.shape[0] * max_k_len
    else:
        pairs = attention_pairs(q_offsets, k_offsets, causal, window)
    return 2 * pairs * q.shape[1] * q.shape[2]


@register_flop_formula(torch.ops.recsys_norm.gdpa, get_raw=True)
def _gdpa_flops(q, k, v, q_offsets, k_offsets, max_q, max_k, activation, scale, causal, window, **kwargs) -> int:
    return 2 * _product_flops(q, k, q_offsets, k_offsets, max_k, causal, window)


@register_flop_formula(torch.ops.recsys_norm.gdpa_backward, get_raw=True)
def _gdpa_backward_flops(
    grad, q, k, v, q_offsets, k_offsets, max_q, max_k, activation, scale, causal, window, **kwargs
) -> int:
    return 5 * _product_flops(q, k, q_offsets, k_offsets, max_k, causal, window)


@register_flop_formula(torch.ops.recsys_norm.jagged_softmax, get_raw=True)
def _softmax_flops(q, k, v, q_offsets, k_offsets, max_q, max_k, scale, causal, window, **kwargs) -> int:
    return 2 * _product_flops(q, k, q_offsets, k_offsets, max_k, causal, window)


@register_flop_formula(torch.ops.recsys_norm.jagged_softmax_backward, get_raw=True)
def _softmax_backward_flops(
    grad, q, k, v, q_offsets, k_offsets, out, lse, max_q, max_k, scale, causal, window, **kwargs
) -> int:
    return 5 * _product_flops(q, k, q_offsets, k_offsets, max_k, causal, window)
