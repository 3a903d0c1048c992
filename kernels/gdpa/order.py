"""The order in which programs take sequences of very different lengths: the longest first, so that no program starts on a
long one when the others are done."""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.gdpa.common import rank_sequences

RANKED = 32  # sequences that a program ranks


@triton.jit(do_not_specialize=["batch"])
def longest_first(offsets_ptr, order_ptr, batch, RANKED: tl.constexpr):
    """order[i]: the sequence that is the i-th longest."""
    rank_sequences(offsets_ptr, order_ptr, tl.program_id(0), batch, RANKED)
