"""Of the forward of jagged attention (gdpa_forward_kernels.py): which part of the work is a program's.

The work is a line: head after head, in each head sequence after sequence, each as long as EXTRA and its queries together.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gdpa_backward_ranges import BLOCK

EXTRA = gl.constexpr(128)  # what a sequence costs beside its queries, in queries: its keys and values are as many bytes
LANES = gl.constexpr(1024)  # sequences that a look at the offsets takes in at once


@gluon.jit
def count_begun(begins, inside, x):
    return gl.sum(((begins <= x) & inside).to(gl.int32), axis=0)


@gluon.jit
def refine(offsets_ptr, step, batch, lanes, stride, count, x):
    """The last sequence that begins at x or before, of the `stride` ones from the last of `count` that were looked at."""
    base = (gl.maximum(count, 1) - 1) * stride
    found = 0
    for first in range(0, stride, LANES):
        b = base + first + lanes
        inside = (first + lanes < stride) & (b < batch)
        begins = gl.load(offsets_ptr + b * step, mask=inside, other=0) + EXTRA * b
        found += count_begun(begins, inside, x)
    return base + gl.maximum(found, 1) - 1


@gluon.jit
def cut(offsets_ptr, step, head, batch, b, x):
    """(head * batch + sequence, query) of place x of a head, in sequence b; the query is a multiple of 64."""
    begin = gl.load(offsets_ptr + b * step)
    length = gl.load(offsets_ptr + (b + 1) * step) - begin
    query = gl.maximum(x - begin - EXTRA * b - EXTRA + BLOCK - 1, 0) // BLOCK * BLOCK
    ends = (query > 0) & (query >= length)
    return head * batch + b + gl.where(ends, 1, 0), gl.where(ends, 0, query)


@gluon.jit
def cuts(offsets_ptr, step, batch, heads, program, programs):
    """Where a program's range begins and where it ends. Both are looked for at once: each look waits for memory."""
    each = gl.load(offsets_ptr + batch * step) + EXTRA * batch  # of a head
    units = (heads * each + BLOCK - 1) // BLOCK
    x = gl.minimum(program * units // programs * BLOCK, heads * each)
    y = gl.minimum((program + 1) * units // programs * BLOCK, heads * each)
    x_head = x // each
    y_head = y // each
    x -= x_head * each
    y -= y_head * each
    lanes = gl.arange(0, LANES, gl.BlockedLayout([8], [32], [4], [0]))
    stride = (batch + LANES - 1) // LANES
    b = lanes * stride
    begins = gl.load(offsets_ptr + b * step, mask=b < batch, other=0) + EXTRA * b
    x_count = count_begun(begins, b < batch, x)
    y_count = count_begun(begins, b < batch, y)
    x_b = gl.maximum(x_count, 1) - 1
    y_b = gl.maximum(y_count, 1) - 1
    if stride > 1:
        x_b = refine(offsets_ptr, step, batch, lanes, stride, x_count, x)
        y_b = refine(offsets_ptr, step, batch, lanes, stride, y_count, y)
    first, first_query = cut(offsets_ptr, step, x_head, batch, x_b, x)
    last, last_query = cut(offsets_ptr, step, y_head, batch, y_b, y)
    return first, first_query, last, last_query
