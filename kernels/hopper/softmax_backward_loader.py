"""Of the backward of windowed softmax attention (softmax_backward_kernels.py): which pairs of a sequence and a head are a
program's, and the loader, which walks through them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .barriers import await_phase
from .facts import pointer
from .gdpa_backward_kernels import STAGES, load_pair
from .gdpa_backward_moves import arrive, program_id
from .gdpa_backward_ranges import BATCH, BLOCK, KEYS, Q_OFFSETS, Q_STEP, WIDTH, bounds, note_part, whole
from .softmax_backward_moves import HEADS, ORDER, REACH, ROUNDS, fetch_stats


@gluon.jit
def turn_of(r, program):
    """Which pair is a program's r-th, in the order of their lengths: every second round goes the other way, so that all
    programs get equal amounts."""
    programs = gl.num_programs(0)
    return r * programs + gl.where(r & 1 == 0, program, programs - 1 - program)


@gluon.jit
def count_parts(offsets_ptr, order_ptr, step, batch, heads, rounds):
    """Parts of the program's pairs."""
    lanes = gl.arange(0, 512, gl.BlockedLayout([4], [32], [4], [0]))
    parts = 0
    for first in range(0, rounds, 512):
        place = turn_of(first + lanes, gl.program_id(0)) // heads
        inside = (first + lanes < rounds) & (place < batch)
        at = offsets_ptr + gl.load(order_ptr + place, mask=inside, other=0) * step
        length = gl.load(at + step, mask=inside, other=0) - gl.load(at, mask=inside, other=0)
        parts += gl.sum((length + KEYS - 1) // KEYS, axis=0)
    return parts


@gluon.jit
def pair(facts, r):
    """Head, first row and length of the program's r-th pair, of which there may be none: length 0."""
    heads = whole(facts, HEADS)
    x = turn_of(r, program_id())
    place = x // heads
    length = 0
    row = 0
    if place < whole(facts, BATCH):
        b = gl.load(pointer(facts, ORDER, gl.int32) + place)
        row, length = bounds(facts, Q_OFFSETS, Q_STEP, b)
    return x - place * heads, row, length


@gluon.jit
def loader(
    q_desc, k_desc, v_desc, do_desc, k_s, v_s, q_s, do_s, stats_s, facts, notes, kv_full, kv_free, full, free
):  # fmt: skip
    i = 0
    turn = 0
    for r in range(whole(facts, ROUNDS)):
        head, row, length = pair(facts, r)
        column = head * WIDTH
        for key in range(0, length, KEYS):
            place = i & 1
            bar = kv_full.index(place)
            rows = gl.minimum(length - key, whole(facts, REACH))
            await_phase(kv_free.index(place), ((i >> 1) & 1) ^ 1)
            note_part(notes, place, column, row + key, rows, key, gl.minimum(length - key, KEYS), 0)
            mbarrier.expect(bar, 4 * k_desc.nbytes_per_cta)
            for half in gl.static_range(2):
                at = 2 * place + half
                load_pair(k_desc, k_s.index(at), v_desc, v_s.index(at), bar, row + key + half * BLOCK, column)
            for first in range(0, rows, BLOCK):
                stage = turn % STAGES
                bar = full.index(stage)
                await_phase(free.index(stage), ((turn // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, 2 * q_desc.nbytes_per_cta)
                load_pair(q_desc, q_s.index(stage), do_desc, do_s.index(stage), bar, row + key + first, column)
                fetch_stats(stats_s.index(stage), facts, head, row + key + first, length - key - first)
                arrive(bar)
                turn += 1
            i += 1
