"""The PTX written by hand of the cluster post-norm whose consumers run one text, by a model of it."""

import numpy as np
import pytest
import torch
from ptx_model import LANES, Machine, bits, real, to_bf16

from recsys_norm.kernels.hopper import postnorm_cluster
from recsys_norm.kernels.hopper import postnorm_joint_steps as steps
from recsys_norm.kernels.hopper import postnorm_joint_stores as stores

PLACE, ROWS, COLUMNS = 1 << 14, 64, 128
FIRST = 16 * (LANES // 32) + LANES % 32 // 4  # the first of a thread's two rows


def columns_of(quads):
    """The result's column for each of a product's."""
    return postnorm_cluster.quads(torch.arange(COLUMNS)[:, None]).reshape(-1).numpy() if quads else np.arange(COLUMNS)


def registers_of(tile, quads):
    """An accumulator's registers for a tile of the result."""
    tile, column = tile[:, columns_of(quads)], 2 * (LANES % 4)
    return [tile[FIRST + 8 * (i >> 1 & 1), column + (i & 1) + 8 * (i >> 2)] for i in range(64)]


def random(seed=0, mean=0.0, width=COLUMNS):
    tile = np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32) + np.float32(mean)
    tile[:, width:] = 0
    return tile


def machine():
    return Machine(np.zeros(1 << 16, np.uint8), np.zeros(1 << 17, np.uint8))


def put(memory, at, array):
    data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    memory[at : at + data.size] = data


def names(prefix, count):
    return [f"{prefix}{i}" for i in range(count)]


def values(prefix, registers):
    return {f"{prefix}{i}": bits(v) for i, v in enumerate(registers)}


def read(m, prefix, count):
    return [real(m.registers[f"{prefix}{i}"]) for i in range(count)]


def rows(pair):
    """[ROWS] of a thread's two rows, which all lanes of a quad must agree about."""
    out = np.zeros(ROWS, np.float32)
    for k in range(2):
        assert (pair[k].reshape(32, 4) == pair[k].reshape(32, 4)[:, :1]).all()
        out[FIRST + 8 * k] = pair[k]
    return out


@pytest.mark.parametrize("quads", [False, True])
def test_an_accumulator_starts_with_the_bias_and_is_scaled_by_gamma(quads):
    m, tile = machine(), random()
    bias, gamma, beta = np.random.default_rng(1).standard_normal((3, COLUMNS)).astype(np.float32)
    put(m.shared, PLACE, np.tile(bias.reshape(64, 1, 2), (1, 2, 1)))  # four values per pair of columns
    put(m.shared, PLACE + 1024, np.stack([gamma.reshape(64, 2), beta.reshape(64, 2)], 1))
    m.run(steps._begin.fn(quads, (names("o", 64),), (("tid",), ("at",))), {"at": PLACE, "tid": LANES})
    for found, wanted in zip(read(m, "o", 64), registers_of(np.tile(bias, (ROWS, 1)), quads)):
        assert np.array_equal(found, wanted)
    text = steps._affine.fn(quads, (names("o", 64),), (names("v", 64), ("tid",), ("at",)))
    m.run(text, values("v", registers_of(tile, quads)) | {"at": PLACE + 1024, "tid": LANES})
    for found, wanted in zip(read(m, "o", 64), registers_of(tile * gamma + beta, quads)):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "row,end,column,width", [(0, 64, 0, 128), (64, 101, 128, 128), (3, 12, 8, 24), (0, 1, 0, 8), (5, 0, 0, 96)]
)
def test_a_residual_is_added(row, end, column, width):
    m, more, tile = machine(), to_bf16(np.random.default_rng(2).standard_normal((112, 264))).astype(np.uint16), random()
    put(m.memory, 512, more)
    where = {"ptr": 512, "pitch": 264, "row": row, "end": end, "column": column, "width": width}
    held = {}
    for half in range(2):
        words = names(f"w{half}", 16)
        m.run(steps._load.fn(half, (words,), [(n,) for n in where]), where)
        held |= {w: m.registers[w] for w in words}
    text = steps._add.fn("bf16", (names("o", 64),), (names("w0", 16), names("w1", 16), names("v", 64)))
    m.run(text, held | values("v", registers_of(tile, True)))
    there = max(0, min(ROWS, end - row))
    part = (more[row : row + there, column : column + width].astype(np.uint32) << 16).view(np.float32)
    tile[:there, :width] += part
    for found, wanted in zip(read(m, "o", 64), registers_of(tile, True)):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("quads", [False, True])
@pytest.mark.parametrize("width", [128, 104, 8])
@pytest.mark.parametrize("mean", [0.0, 5.0, -1e3, 3e4])
def test_moments_keep_their_digits_about_any_mean(quads, width, mean):
    tile = random(3, mean, width)
    tile[5, :width] = 3.0  # a constant row, a zero row, and one with another mean than its warp's others
    tile[9] = 0
    tile[20, :width] += 1e3
    m = machine()
    inputs = (names("v", 64), ("tid",), ("width",), ("share",))
    text = steps._moments.fn(quads, (names("mean", 2), names("square", 2)), inputs)
    m.run(text, values("v", registers_of(tile, quads)) | {"tid": LANES, "width": width, "share": bits(1 / width)})
    wide = tile[:, :width].astype(np.float64)
    found = rows(read(m, "square", 2))
    np.testing.assert_allclose(rows(read(m, "mean", 2)), wide.mean(1), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found, wide.var(1) * width, rtol=1e-4, atol=width * (mean * 2**-22) ** 2)
    assert found[9] == 0 and (width & width - 1 or found[5] == 0)


def test_squares_of_a_row():
    tile, m = random(4), machine()
    m.run(steps._squares.fn((names("square", 2),), (names("v", 64),)), values("v", registers_of(tile, False)))
    np.testing.assert_allclose(rows(read(m, "square", 2)), (tile.astype(np.float64) ** 2).sum(1), rtol=1e-6)


@pytest.mark.parametrize(
    "peers,members,last", [(4, 4, 128), (4, 3, 40), (4, 2, 8), (8, 8, 128), (8, 7, 104), (4, 1, 64)]
)
@pytest.mark.parametrize("mean", [0.0, 50.0])
def test_parts_of_a_row_are_merged(peers, members, last, mean):
    width = COLUMNS * (members - 1) + last
    z = np.random.default_rng(5).standard_normal((ROWS, width)) + mean
    parts = [z[:, COLUMNS * j : COLUMNS * (j + 1)] for j in range(members)]
    messages = np.full((peers, 32, 2, 2), np.nan, np.float32)  # [peer, quad, row and row + 8, (mean, squares)]
    row = 16 * (np.arange(32) // 8) + np.arange(32) % 8
    for j, part in enumerate(parts):
        for i in range(2):
            messages[j, :, i, 0] = part.mean(1)[row + 8 * i]
            messages[j, :, i, 1] = (part.var(1) * part.shape[1])[row + 8 * i]
    m = machine()
    put(m.shared, PLACE, messages)
    share = last / width
    names_of = {
        "tid": LANES,
        "buffer": PLACE,
        "members": members,
        "part": bits(share),
        "weight": bits((width - last) * share),
    }
    for layer, about, spread in ((True, z.mean(1), z.var(1) * width),
                                 (False, None, sum(p.var(1) * p.shape[1] for p in parts))):  # fmt: skip
        m.run(steps.collected.fn(layer, peers, (names("m", 2), names("s", 2)), [(n,) for n in names_of]), names_of)
        np.testing.assert_allclose(rows(read(m, "s", 2)), spread, rtol=1e-5)
        if layer:
            np.testing.assert_allclose(rows(read(m, "m", 2)), about, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("row,end,groups", [(0, 64, 1), (64, 101, 3), (2, 3, 1)])
def test_statistics_are_saved(layer, row, end, groups):
    m, tile = machine(), random(6)
    mean, rstd = np.random.default_rng(7).standard_normal((2, ROWS)).astype(np.float32)
    operands = values("v", registers_of(tile, False))
    operands |= {f"mean{i}": bits(mean[FIRST + 8 * i]) for i in range(2)} | {"row": row, "end": end, "groups": groups}
    operands |= {f"rstd{i}": bits(rstd[FIRST + 8 * i]) for i in range(2)} | {"mean_ptr": 1024, "rstd_ptr": 4096}
    m.memory[:] = 255
    operands["tid"] = LANES
    tensors = (names("mean", 2), names("rstd", 2), names("v", 64))
    inputs = (("tid",), ("mean_ptr",), ("rstd_ptr",), *tensors, ("row",), ("end",), ("groups",))
    m.run(steps._save.fn(layer, "bf16", (), inputs), operands)
    there = max(0, min(ROWS, end - row))
    start = real(to_bf16(tile[:, 0]) << 16)
    for at, wanted in ((1024, mean - start if layer else None), (4096, rstd)):
        expected = np.full(700, -1, np.int32).view(np.float32)
        if wanted is not None:
            expected[(row + np.arange(there)) * groups] = wanted[:there]
        size = (4096 - 1024) // 4 if at == 1024 else 700
        found = m.memory[at : at + 4 * size].view(np.int32)
        assert np.array_equal(found[:700], expected.view(np.int32)[: len(found[:700])])


@pytest.mark.parametrize("quads", [False, True])
@pytest.mark.parametrize(
    "row,end,column,width", [(0, 64, 0, 128), (64, 101, 128, 128), (3, 12, 8, 24), (0, 1, 0, 8), (5, 60, 0, 96)]
)
def test_rows_go_through_a_place_of_their_warp_to_memory(quads, row, end, column, width):
    m, tile = machine(), random(8)
    where = {"tid": LANES, "place": PLACE + LANES // 32 * 2048, "ptr": 512, "pitch": 264}
    where |= {"row": row, "end": end, "column": column, "width": width}
    text = stores._store.fn("bf16", quads, (*((n,) for n in where), names("v", 64)))
    m.memory[:] = 255
    m.run(text, values("v", registers_of(tile, quads)) | where)
    memory = m.memory[512 : 512 + 112 * 528].view(np.uint16).reshape(-1, 264)
    expected = np.full_like(memory, 0xFFFF)
    there = max(0, min(ROWS, end - row))
    expected[row : row + there, column : column + width] = to_bf16(tile)[:there, :width]
    assert np.array_equal(memory, expected) and (m.memory[:512] == 255).all()
    assert not m.shared[:PLACE].any() and not m.shared[PLACE + 4 * 2048 :].any()
