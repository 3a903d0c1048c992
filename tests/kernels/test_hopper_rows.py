"""The PTX written by hand of the cluster post-norm and of attention's backward, by a model of it."""

import numpy as np
import pytest
import torch
from ptx_model import LANES, Machine, bits, real, to_bf16, unswizzled

from recsys_norm.kernels.hopper import (
    gdpa_backward_moves,
    postnorm_cluster,
    postnorm_direct_steps,
    postnorm_rows,
)
from recsys_norm.kernels.hopper import postnorm_cluster_exchange as exchange

PLACE, ROWS = 1 << 14, 64


def machine():
    return Machine(np.zeros(1 << 16, np.uint8), np.zeros(1 << 16, np.uint8))


def registers_of(tile):
    """An accumulator's registers for a [64, n] tile: bit 0 of a number is the column, bit 1 row + 8, the rest 8 columns."""
    row, column = 16 * (LANES // 32) + LANES % 32 // 4, 2 * (LANES % 4)
    count = tile.shape[1] // 2
    return [tile[row + 8 * (i >> 1 & 1), column + (i & 1) + 8 * (i >> 2)] for i in range(count)]


def tile_of(registers):
    tile = np.zeros((ROWS, 2 * len(registers)), np.float32)
    row, column = 16 * (LANES // 32) + LANES % 32 // 4, 2 * (LANES % 4)
    for i, values in enumerate(registers):
        tile[row + 8 * (i >> 1 & 1), column + (i & 1) + 8 * (i >> 2)] = values
    return tile


def narrow(*shape, seed=0):
    return to_bf16(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(np.uint16)


def widen(words):
    return (words.astype(np.uint32) << 16).view(np.float32)


def operands(prefix, values):
    names = [f"{prefix}{i}" for i in range(len(values))]
    return names, {name: bits(value) for name, value in zip(names, values)}


def put(memory, at, array):
    data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    memory[at : at + data.size] = data


def test_accumulators_go_to_shared_memory():
    m, tile = machine(), widen(narrow(ROWS, 128))
    names, values = operands("v", registers_of(tile))
    m.run(gdpa_backward_moves._keep_rows.fn((), (("place",), ("zero",), names)), values | {"place": PLACE, "zero": 0})
    assert np.array_equal(unswizzled(m.shared[PLACE : PLACE + 16384]), to_bf16(tile))


@pytest.mark.parametrize(
    "peers,members,columns,last", [(4, 4, 128, 128), (4, 3, 128, 40), (4, 2, 128, 8), (8, 7, 128, 104)]
)
@pytest.mark.parametrize("mean", [0.0, 50.0])
def test_parts_of_a_row_are_merged(peers, members, columns, last, mean):
    width = columns * (members - 1) + last
    z = np.random.default_rng(0).standard_normal((ROWS, width)) + mean
    parts = [z[:, columns * j : columns * (j + 1)] for j in range(members)]
    m = machine()
    messages = np.full((peers, 32, 2, 2), np.nan, np.float32)  # [peer, quad, row and row + 8, (mean, M2)]
    row = 16 * (np.arange(32) // 8) + np.arange(32) % 8
    for j, part in enumerate(parts):
        for i in range(2):
            messages[j, :, i, 0] = part.mean(1)[row + 8 * i]
            messages[j, :, i, 1] = (part.var(1) * part.shape[1])[row + 8 * i]
    put(m.shared, PLACE, messages)
    inputs = (("buffer",), ("members",), ("columns",), ("last",), ("inverse",))
    names = {
        "buffer": PLACE,
        "members": members,
        "columns": bits(columns),
        "last": bits(last),
        "inverse": bits(1 / width),
    }
    for form, expected in (("_merge", (z.mean(1), z.var(1) * width)),
                           ("_squares", (0 * z.mean(1), sum(p.var(1) * p.shape[1] for p in parts)))):  # fmt: skip
        m.run(getattr(exchange, f"{form}{peers}").fn((("m0", "m1"), ("q0", "q1")), inputs), names)
        first = 16 * (LANES // 32) + LANES % 32 // 4
        for i in range(2):
            np.testing.assert_allclose(real(m.registers[f"m{i}"]), expected[0][first + 8 * i], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(real(m.registers[f"q{i}"]), expected[1][first + 8 * i], rtol=1e-5)


# ---- columns of a product in another order ---------------------------------------------------------------------------


def result_columns():
    """The result's column for each of a product's, from the order in which rows of W come."""
    return postnorm_cluster.quads(torch.arange(128)[:, None]).reshape(-1).numpy()


def test_rows_of_w_are_padded_to_whole_quads():
    weight = torch.arange(40 * 8.0).view(40, 8)
    rows = postnorm_cluster.quads(weight).reshape(64, 8)
    assert torch.equal(rows[:32], weight[result_columns()[:32]])
    assert torch.equal(rows[32:], torch.nn.functional.pad(weight[32:], (0, 0, 0, 24))[result_columns()[:32]])


PLACES = (("ptr",), ("pitch",), ("row",), ("end",), ("column",), ("width",))


def places(row, end, column, width):
    return {"ptr": 512, "pitch": 264, "row": row, "end": end, "column": column, "width": width}


@pytest.mark.parametrize(
    "row,end,column,width", [(0, 64, 0, 128), (64, 101, 128, 128), (3, 12, 8, 24), (0, 1, 0, 8), (5, 0, 0, 96)]
)
def test_permuted_rows_are_added_and_stored(row, end, column, width):
    order = result_columns()
    m, more = machine(), narrow(112, 264)
    put(m.memory, 512, more)
    tile = widen(narrow(ROWS, 128, seed=1))
    words, out = [f"w{i}" for i in range(32)], [f"o{i}" for i in range(64)]
    m.run(postnorm_rows._load.fn((words,), PLACES), places(row, end, column, width))
    held = {w: m.registers[w] for w in words}
    names, values = operands("v", registers_of(tile[:, order]))
    m.run(postnorm_rows._add_bf16.fn((out,), (words, names)), held | values)
    there = max(0, min(ROWS, end - row))
    expected = tile.copy()
    expected[:there, :width] += widen(more)[row : row + there, column : column + width]
    found = [real(m.registers[o]) for o in out]
    assert np.array_equal(tile_of(found), expected[:, order])

    m.memory[:] = 255
    m.run(postnorm_rows._store_bf16.fn((), (*PLACES, names)), values | places(row, end, column, width))
    memory = m.memory[512 : 512 + 112 * 528].view(np.uint16).reshape(-1, 264)
    wanted = np.full_like(memory, 0xFFFF)
    wanted[row : row + there, column : column + width] = to_bf16(tile)[:there, :width]
    assert np.array_equal(memory, wanted) and (m.memory[:512] == 255).all()


def test_a_thread_gets_the_vector_s_values_of_its_columns():
    m, vector = machine(), np.arange(128, dtype=np.float32)
    put(m.shared, PLACE, vector[postnorm_rows.column_of.fn(np.arange(128))])
    out = [f"o{i}" for i in range(32)]
    m.run(postnorm_rows._vector.fn((out,), (("base",),)), {"base": PLACE})
    found = [m.registers[o] for o in out]
    expected = registers_of(np.tile(vector[result_columns()], (ROWS, 1)))
    for j in range(16):
        for e in range(2):
            assert np.array_equal(real(found[2 * j + e]), expected[4 * j + e])


@pytest.mark.parametrize("width", [8, 40, 104])
def test_deviations_of_the_last_columns_are_squared(width):
    tile = np.random.default_rng(0).standard_normal((ROWS, 128)).astype(np.float32)
    names, values = operands("v", registers_of(tile[:, result_columns()]))
    mean = [bits(np.full(128, 0.5)), bits(np.full(128, -2.0))]
    values |= {"m0": mean[0], "m1": mean[1], "width": width} | {f"s{i}": 0 for i in range(4)}
    m = machine()
    args = ([f"s{i}" for i in range(4)], names, ["m0", "m1"], ("width",))
    m.run(postnorm_direct_steps._tail_square_asm.fn(([f"d{i}" for i in range(4)],), args), values)
    quads = [real(m.registers[f"d{i}"]) + real(m.registers[f"d{i + 2}"]) for i in range(2)]
    first = 16 * (LANES // 32) + LANES % 32 // 4
    for i, about in enumerate((0.5, -2.0)):
        found = quads[i].reshape(32, 4).sum(1)
        expected = ((tile[:, :width] - about) ** 2).sum(1)[first.reshape(32, 4)[:, 0] + 8 * i]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
