"""Of the backward of jagged attention (gdpa_backward_kernels.py): which part of the work is a program's, and where it notes
that and what else it needs now and then."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .facts import fact, pointer

BLOCK = gl.constexpr(64)  # queries of a block, keys of a consumer, columns of a panel
WIDTH = gl.constexpr(128)  # of a head
KEYS = gl.constexpr(128)  # most keys of a sequence
EXTRA = gl.constexpr(64)  # what a sequence costs beside its queries, in queries


@gluon.jit
def find(offsets_ptr, step, batch, x):
    """The last sequence b with offsets[b] + EXTRA * b <= x."""
    lanes = gl.arange(0, 512, gl.BlockedLayout([4], [32], [4], [0]))
    stride = (batch + 511) // 512
    b = lanes * stride
    begin = gl.load(offsets_ptr + b * step, mask=b < batch, other=0) + EXTRA * b
    count = gl.sum(((begin <= x) & (b < batch)).to(gl.int32), axis=0)
    base = (gl.maximum(count, 1) - 1) * stride
    found = 0
    for first in range(0, stride, 512):
        b = base + first + lanes
        inside = (first + lanes < stride) & (b < batch)
        begin = gl.load(offsets_ptr + b * step, mask=inside, other=0) + EXTRA * b
        found += gl.sum(((begin <= x) & inside).to(gl.int32), axis=0)
    return base + gl.maximum(found, 1) - 1


@gluon.jit
def cut(offsets_ptr, step, batch, heads, x):
    """Where a range begins: (head * batch + sequence, query), the query being a multiple of 64."""
    each = gl.load(offsets_ptr + batch * step) + EXTRA * batch
    head = gl.minimum(x // each, heads)
    x -= head * each
    b = find(offsets_ptr, step, batch, x)
    begin = gl.load(offsets_ptr + b * step)
    length = gl.load(offsets_ptr + (b + 1) * step) - begin
    query = gl.maximum(x - begin - EXTRA * b - EXTRA + BLOCK - 1, 0) // BLOCK * BLOCK
    ends = (query > 0) & (query >= length)
    return head * batch + b + gl.where(ends, 1, 0), gl.where(ends, 0, query)


# What is needed now and then waits in shared memory and not in registers, at these places (8 bytes each). ZERO is added
# to a thread's number where addresses are made from it, else ptxas keeps all that it makes of that number in registers.
Q_OFFSETS, K_OFFSETS, Q_STEP, K_STEP, BATCH, MOST = (gl.constexpr(i) for i in range(6))
FIRST, FIRST_QUERY, LAST, LAST_QUERY = (gl.constexpr(i) for i in range(6, 10))
DQ, DK, DV, SUMS, FLAGS, PITCH, QUERIES, KEY_ROWS, ZERO = (gl.constexpr(i) for i in range(10, 19))
FACTS = gl.constexpr(32)  # a power of two


@gluon.jit
def whole(facts, i: gl.constexpr):
    return fact(facts, i).to(gl.int32)


@gluon.jit
def count_parts(facts):
    return whole(facts, LAST) - whole(facts, FIRST) + gl.where(whole(facts, LAST_QUERY) > 0, 1, 0)


@gluon.jit
def bounds(facts, offsets: gl.constexpr, step: gl.constexpr, b):
    """First row and rows of sequence b."""
    at = pointer(facts, offsets, gl.int32) + b * whole(facts, step)
    first = gl.load(at)
    return first, gl.load(at + whole(facts, step)) - first


@gluon.jit
def part(facts, i):
    """Of part i, counted from the end of the range: head, first row of q, first query, end, first key, keys."""
    last_query = whole(facts, LAST_QUERY)
    pair = whole(facts, LAST) - i - gl.where(last_query > 0, 0, 1)
    head = pair // whole(facts, BATCH)
    b = pair - head * whole(facts, BATCH)
    row, length = bounds(facts, Q_OFFSETS, Q_STEP, b)
    key, keys = bounds(facts, K_OFFSETS, K_STEP, b)
    begin = gl.where(pair == whole(facts, FIRST), whole(facts, FIRST_QUERY), 0)
    end = gl.where(pair == whole(facts, LAST), last_query, length)
    return head, row, begin, end, key, gl.minimum(keys, whole(facts, MOST))


# What the consumers want to know of a part, beside its keys and values in shared memory.
COLUMN, ROW, ROWS, KEY, COUNT, FORM = (gl.constexpr(i) for i in range(6))  # COUNT: of keys
ADD, LEAVE = gl.constexpr(1), gl.constexpr(2)  # bits of FORM: begins, ends in the middle of a sequence


@gluon.constexpr_function
def _note(outputs, inputs):
    (notes,), (place,), *values = inputs
    column, row, rows, key, count, form = (v[0] for v in values)
    return f"""{{ .reg .b32 at; shl.b32 at, {place}, 5; add.u32 at, at, {notes};
    st.shared.v4.b32 [at], {{{column}, {row}, {rows}, {key}}}; st.shared.v2.b32 [at + 16], {{{count}, {form}}};
    bar.warp.sync 0xffffffff; }}"""


@gluon.jit
def note_part(notes, place, column, row, rows, key, count, form):
    """By one warp, which then arrives where the consumers wait."""
    args = [notes, place, column, row, rows, key, count, form]
    gl.inline_asm(_note, "r,r,r,r,r,r,r,r,~{memory}", args, (), is_pure=False)


@gluon.constexpr_function
def note_asm(i):
    return f"{{ .reg .b32 at; shl.b32 at, $2, 5; add.u32 at, at, $1; ld.shared.b32 $0, [at + {4 * i}]; }}"


@gluon.jit
def note(notes, place, i: gl.constexpr):
    asm: gl.constexpr = note_asm(i)
    return gl.inline_asm(asm, "=r,r,r,~{memory}", [notes, place], gl.int32, is_pure=False)
