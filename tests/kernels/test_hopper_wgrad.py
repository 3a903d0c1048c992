"""What consumers of the weight gradient's kernel do, by a model of the PTX written by hand for it."""

import numpy as np
import pytest
import torch
from ptx_model import LANES, Machine, bits, pair_of, real

from recsys_norm.kernels.hopper import wgrad_steps as steps

DY, FACTORS, X, START = 1024, 16384, 32768, 256
TYPES = {"bf16": "bf16", "fp16": "f16"}  # as PTX calls them
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def names(prefix, count):
    return tuple(f"{prefix}{i}" for i in range(count))


def put_tile(m, at, tile):
    """[64, n] of 16-bit values as TMA leaves them: panels of 64 columns, 16-byte pieces of a row permuted."""
    row, column = np.ogrid[:64, : tile.shape[1]]
    place = at + column // 64 * 8192 + row * 128 + (column % 64 // 8 ^ row % 8) * 16 + column % 8 * 2
    m.shared.view(np.uint16)[place // 2] = tile.view(torch.int16).numpy().view(np.uint16)


def machine(kind, columns, seed=0):
    """A slot of dy, x and rstd; all of them, too, in fp64."""
    g = torch.Generator().manual_seed(seed)
    m = Machine(np.zeros(1 << 17, np.uint8), np.full(1 << 18, 0xFF, np.uint8))
    dy, x = (torch.randn(64, n, generator=g).to(DTYPES[kind]) for n in (64, columns))
    rstd = torch.rand(64, generator=g) + 0.5
    put_tile(m, DY, dy)
    put_tile(m, X, x)
    rows = rstd.numpy().view(np.int32).astype(np.int64)
    values = {"r0": rows[2 * (LANES % 32)], "r1": rows[2 * (LANES % 32) + 1], "at": FACTORS}
    run(m, steps.pack_asm.fn(TYPES[kind], (("r0", "r1"), ("at",))), **values)
    return m, dy.double(), x.double(), rstd.double()


def run(m, text, **values):
    """Keeps the registers of what ran before."""
    m.run(text, {**getattr(m, "registers", {}), **values})


def named(text, operands):
    for i in reversed(range(len(operands))):
        text = text.replace(f"${i}", operands[i])
    assert "$" not in text
    return text


def take(m, kind, columns, more=0, groups=0, **values):
    """Runs a slot; registers d0, d1, ... of the result, p0 to p15 of P^T, s0 and s1 of the sums."""
    acc, sums = names("d", (columns + more) // 2), names("s", 2)
    where = dict(dy=DY, factors=FACTORS, place=X, further=X + columns // 64 * 8192, groups=groups)
    operands = [*acc, *names("p", 16), *sums, *acc, *sums, "at0", "at1", *list(where)[:4], "follows", "groups"]
    run(m, steps.places_asm.fn((names("at", 2),), ()))
    text = named(steps.take_asm.fn(TYPES[kind], columns, more), operands)
    run(m, text, **where, **dict.fromkeys(sums, bits(1.0)) | values)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_dy_is_scaled_as_the_product_wants_it(kind):
    m, dy, _, rstd = machine(kind, 64)
    take(m, kind, 64, follows=0, **dict.fromkeys(names("d", 32), bits(1e9)))
    expected = (dy * rstd[:, None]).numpy()
    lane, unit = LANES % 32, {"bf16": 2.0**-8, "fp16": 2.0**-11}[kind]
    for r in range(16):
        n = 16 * (LANES // 32) + lane // 4 + 8 * (r % 2)
        for half, value in enumerate(pair_of(m.registers[f"p{r}"], kind)):
            want = expected[16 * (r // 4) + 8 * (r // 2 % 2) + 2 * (lane % 4) + half, n]
            assert (np.abs(value - want) <= 1.01 * unit * np.abs(want)).all()


@pytest.mark.parametrize("groups", [0, 0b1111, 0b0101, 0b1000])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_columns_of_dy_are_summed(kind, groups):
    m, dy, _, _ = machine(kind, 64)
    take(m, kind, 64, groups=groups, follows=0, **dict.fromkeys(names("d", 32), bits(0.0)))
    total = np.zeros(64)
    for i in range(2):
        np.add.at(total, 16 * (LANES // 32) + LANES % 32 // 4 + 8 * i, real(m.registers[f"s{i}"]))
    chosen = [16 * j + i for j in range(4) if groups >> j & 1 for i in range(16)]
    assert np.allclose(total, 4.0 + dy.numpy()[chosen].sum(0), atol=1e-5)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("columns,rows,inside", [(256, 64, 256), (128, 40, 136), (64, 200, 24), (256, 8, 8)])
def test_products_of_two_slots_are_added_and_stored(kind, columns, rows, inside):
    """And nothing else is written. The second time the accumulators count, the first time not."""
    m, dy, x, rstd = machine(kind, columns)
    pitch, acc = inside + 40, names("d", columns // 2)
    for follows in (0, 1):
        before = {} if follows else dict.fromkeys(acc, bits(1e9))
        take(m, kind, columns, follows=follows, **before)
    store = steps.store_asm.fn((), (acc, ("start",), ("rows",), ("inside",), ("pitch",)))
    run(m, store, start=START, rows=rows, inside=inside, pitch=pitch)
    out = m.memory.view(np.float32)[START // 4 :][: 64 * pitch].reshape(64, pitch)
    expected = 2 * (dy * rstd[:, None]).to(DTYPES[kind]).double().t() @ x
    rows, inside = min(rows, 64), min(inside, columns)
    assert np.allclose(
        out[:rows, :inside], expected[:rows, :inside].numpy(), rtol=0, atol=0.05 if kind == "bf16" else 1e-3
    )
    assert np.isnan(out[rows:]).all() and np.isnan(out[:, inside:]).all()
    assert np.isnan(m.memory.view(np.float32)[: START // 4]).all()
    assert np.isnan(m.memory.view(np.float32)[START // 4 + 64 * pitch :]).all()


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_two_parts_of_a_tile_share_p(kind):
    m, dy, x, rstd = machine(kind, 192)
    acc = names("d", 96)
    take(m, kind, 128, 64, follows=0, **dict.fromkeys(acc, bits(1e9)))
    expected = ((dy * rstd[:, None]).to(DTYPES[kind]).double().t() @ x).numpy()
    lane = LANES % 32
    for i in range(96):
        n, k = 16 * (LANES // 32) + lane // 4 + 8 * (i >> 1 & 1), 2 * (lane % 4) + (i & 1) + 8 * (i >> 2)
        assert np.allclose(real(m.registers[acc[i]]), expected[n, k], atol=0.05 if kind == "bf16" else 1e-3)
