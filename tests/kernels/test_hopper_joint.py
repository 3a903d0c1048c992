"""The PTX written by hand of the cluster post-norm whose consumers run one text, by a model of it."""

import numpy as np
import pytest
from ptx_model import LANES, Machine, bits, real, to_bf16

from recsys_norm.kernels.hopper import postnorm_joint_product as product
from recsys_norm.kernels.hopper import postnorm_joint_steps as steps
from recsys_norm.kernels.hopper import postnorm_joint_stores as stores

PLACE, ROWS, COLUMNS = 1 << 14, 64, 128
FIRST = 16 * (LANES // 32) + LANES % 32 // 4  # the first of a thread's two rows


def registers_of(tile):
    """An accumulator's registers."""
    column = 2 * (LANES % 4)
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


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_a_bias_is_the_sum_of_three_parts(scale):
    m, bias = machine(), (scale * np.random.default_rng(1).standard_normal(COLUMNS)).astype(np.float32)
    m.run(product._split.fn("bf16", (), (("tid",), ("tile",), ("v",))), {"tid": LANES, "tile": PLACE, "v": bits(bias)})
    parts = (m.shared[PLACE : PLACE + 2048].view(np.uint16).reshape(128, 8).astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(parts[:, :3].astype(np.float64).sum(1), bias) and not parts[:, 3:].any()


def test_zhat_is_scaled_by_gamma_and_moved_by_beta():
    m, tile = machine(), random()
    gamma, beta = real(to_bf16(np.random.default_rng(1).standard_normal((2, COLUMNS))) << 16)
    put(m.shared, PLACE, np.stack([gamma.reshape(64, 2), beta.reshape(64, 2)], 1))  # per pair of columns
    m.run(steps._pack.fn("bf16", (), (("tid",), ("wide",), ("packed",))), {"tid": LANES, "wide": PLACE, "packed": 4096})
    for text, at in ((steps._affine.fn, PLACE), (steps._affine_bf16.fn, 4096)):
        operands = values("v", registers_of(tile)) | {"base": at, "tid": LANES}
        m.run(text((names("out", 64),), (names("v", 64), ("tid",), ("base",))), operands)
        for found, wanted in zip(read(m, "out", 64), registers_of(tile * gamma + beta)):
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [128, 104, 8])
@pytest.mark.parametrize("mean", [0.0, 5.0, -1e3, 3e4])
def test_moments_keep_their_digits_about_any_mean(width, mean):
    tile = random(3, mean, width)
    tile[5, :width] = 3.0  # a constant row, a zero row, and one with another mean than its warp's others
    tile[9] = 0
    tile[20, :width] += 1e3
    m = machine()
    inputs = (names("v", 64), ("width",), ("share",))
    text = steps._moments.fn((names("mean", 2), names("square", 2)), inputs)
    m.run(text, values("v", registers_of(tile)) | {"width": width, "share": bits(1 / width)})
    wide = tile[:, :width].astype(np.float64)
    found = rows(read(m, "square", 2))
    np.testing.assert_allclose(rows(read(m, "mean", 2)), wide.mean(1), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found, wide.var(1) * width, rtol=1e-4, atol=width * (mean * 2**-22) ** 2)
    assert found[9] == 0 and (width & width - 1 or found[5] == 0)


def test_squares_of_a_row():
    tile, m = random(4), machine()
    m.run(steps._squares.fn((names("square", 2),), (names("v", 64),)), values("v", registers_of(tile)))
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
    operands = values("v", registers_of(tile))
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


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("width", [128, 64, 40])
def test_rows_go_to_places_of_their_warp_and_from_there_to_memory(places, width):
    m, tile = machine(), random(8)
    where = {"tid": LANES, "base": PLACE + LANES // 32 * places * 2048, "row": 192, "column": 256, "width": width}
    text = stores._store.fn(stores.Y_MAP, places, "bf16", (*((n,) for n in where), names("v", 64)))
    m.run(text, values("v", registers_of(tile)) | where | {f"postnorm_joint_kernel_param_{stores.Y_MAP}": 77})
    place = lambda chunk, warp: PLACE + 2048 * (warp * places + chunk % places)  # noqa: E731
    chunks = range(2 if width > 64 else 1)
    assert m.tiles == [(32 * w, 77, 256 + 64 * c, 192 + 16 * w, place(c, w)) for c in chunks for w in range(4)]
    last = [1] if places == 1 else [0, 1]  # what one place holds in the end
    for chunk in last:
        for w in range(4):
            held = m.shared[place(chunk, w) : place(chunk, w) + 2048].view(np.uint16).reshape(16, 8, 8)
            piece = np.stack([held[r][np.arange(8) ^ (r & 7)] for r in range(16)]).reshape(16, 64)
            assert np.array_equal(piece, to_bf16(tile[16 * w : 16 * w + 16, 64 * chunk : 64 * chunk + 64]))
