"""The backward of jagged attention with the norm of the queries inside, without a GPU: what is handed to its kernel, its PTX
by hand, and its text over numpy arrays."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gluon_model import LANGUAGE, Descriptor, Machine, Place, Pointer, Values, bf16, kernels, values
from ptx_model import Machine as Warpgroup
from ptx_model import to_bf16, unswizzled

from recsys_norm.kernels.hopper import gdpa_backward, gdpa_backward_ranges, launch
from recsys_norm.ops.activations import get
from recsys_norm.ops.jagged_torch import Attention, grouped_backward

gdpa_backward_kernels, gdpa_backward_norm = kernels("gdpa_backward_kernels"), kernels("gdpa_backward_norm")
GELU = get("gelu").code
BLOCK, WIDTH = 64, 128
FORMS = {False: "normed", True: "normed_inner"}


# ---- the host's side -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [True, False])
def test_what_the_kernel_gets(inner, monkeypatch):
    calls = []
    monkeypatch.setattr(launch, "get", lambda name: lambda *a, **options: calls.append((name, a, options)))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    q, k, v, grad = (torch.randn(rows, 2, WIDTH).bfloat16() for rows in (70, 40, 40, 70))
    norm = gdpa_backward.Norm(torch.randn(70, 2), torch.randn(32, 2, 8), inner)
    offsets = torch.tensor([0, 1, 70]), torch.tensor([0, 1, 40])
    tensors = (q, k, v, grad, grad, torch.empty_like(k), torch.empty_like(v))
    gdpa_backward.backward(tensors, *offsets, GELU, 100, 0.5, norm)
    ((name, (_, *args), options),) = calls
    assert name == f"gdpa_backward_{FORMS[inner]}_gelu_bf16" and options == {"cooperative": True}
    entry = launch.manifest()["90"]["kernels"][name]
    named = dict(zip((p["name"] for p in entry["params"]), args, strict=True))
    assert named["row_terms_ptr"] is norm.rows and named["column_terms_ptr"] is norm.columns
    assert named["pitch"] == 256 and named["half_scale"] == 0.25 and named["dq_ptr"] is grad
    for parameter in entry["params"]:
        tensor = isinstance(named[parameter["name"]], torch.Tensor)
        assert tensor == (parameter["kind"] in ("tile", "pointer"))


def test_its_kernels_fit_and_spill_nothing():
    for activation in gdpa_backward.ACTIVATIONS.values():
        for form in FORMS.values():
            kernel = launch.manifest()["90"]["kernels"][f"gdpa_backward_{form}_{activation}_bf16"]
            assert kernel["cluster"] == 1 and kernel["spills"] == 0 and kernel["shared"] <= 232_448


# ---- PTX by hand -----------------------------------------------------------------------------------------------------


def swizzled(words):
    """[64, 128] 16-bit values as TMA lays them: two panels of 64 columns, 16-byte pieces swizzled by the row."""
    out = np.zeros((2, BLOCK, 8, 8), np.uint16)
    for row in range(BLOCK):
        for piece in range(8):
            out[:, row, piece ^ (row & 7)] = words[row].reshape(2, 8, 8)[:, piece]
    return out.view(np.uint8).reshape(-1)


def warpgroup(seed=0):
    """With a tile of bf16 values at 8192 of shared memory: (machine, the tile's words)."""
    m = Warpgroup(np.full(1 << 15, 7, np.uint8), np.full(1 << 15, 7, np.uint8))
    words = to_bf16(np.random.default_rng(seed).standard_normal((BLOCK, WIDTH)) * 3 + 1).astype(np.uint16)
    m.shared[8192 : 8192 + 16384] = swizzled(words)
    return m, words


def floats(words):
    return (words.astype(np.uint32) << 16).view(np.float32)


def operands(*names):
    return tuple((name,) for name in names)


@pytest.mark.parametrize("W", [0, 1])
def test_a_consumer_normalises_its_panel(W):
    """By the norm kernel's steps: subtract, multiply, multiply and add at once, each rounded once."""
    m, words = warpgroup()
    g = np.random.default_rng(1)
    terms, columns = g.standard_normal((BLOCK, 2)).astype(np.float32), g.standard_normal((16, 2, 8)).astype(np.float32)
    m.shared[1024 : 1024 + 512] = terms.view(np.uint8).reshape(-1)
    m.memory[2048 : 2048 + 1024] = columns.view(np.uint8).reshape(-1)
    names = dict(tile=8192, terms=1024, columns=2048 + 512 * W, panel=8192 * W, zero=0)
    m.run(gdpa_backward_norm._normalise.fn((), operands(*names)), names)
    hat = (floats(words) - terms[:, :1]) * terms[:, 1:]
    weight, bias = (columns[:, i].reshape(1, WIDTH).astype(np.float64) for i in (0, 1))
    expected = to_bf16((hat.astype(np.float64) * weight + bias).astype(np.float32))
    expected[:, 64 * (1 - W) :][:, :64] = words[:, 64 * (1 - W) :][:, :64]
    assert np.array_equal(unswizzled(m.shared[8192 : 8192 + 16384]), expected)
    assert (m.shared[:1024] == 7).all() and (m.shared[8192 + 16384 :] == 7).all()


@pytest.mark.parametrize("rows", [-1, 0, 1, 16, 37, 63])
def test_a_consumer_clears_its_panel(rows):
    m, words = warpgroup()
    names = dict(tile=8192, rows=rows, panel=8192, zero=0)
    m.run(gdpa_backward_norm._clear_pieces.fn((), operands(*names)), names)
    words[max(rows, 0) :, 64:] = 0
    assert np.array_equal(unswizzled(m.shared[8192 : 8192 + 16384]), words)


@pytest.mark.parametrize("rows", [1, 32, 33, 63, 64, 100])
def test_the_rows_numbers_are_fetched(rows):
    """By a warp: the model has four, which all copy the same."""
    m, _ = warpgroup()
    m.memory[:] = np.random.default_rng(0).integers(0, 255, m.memory.shape)
    names = dict(terms=1024, bar=512, source=4096, rows=rows, zero=0)
    m.run(gdpa_backward_norm._fetch.fn((), operands(*names)), names)
    size = 8 * min(rows, BLOCK)
    assert np.array_equal(m.shared[1024 : 1024 + size], m.memory[4096 : 4096 + size])
    assert (m.shared[1024 + size : 8192] == 7).all() and m.arrived == [4 * 32]


@pytest.mark.parametrize("W", [0, 1])
def test_what_comes_past_the_attention_is_added(W):
    m, words = warpgroup()
    outputs = ([f"w{i}" for i in range(16)],)
    names = dict(tile=8192, panel=8192 * W, zero=0)
    m.run(gdpa_backward_norm._take.fn(outputs, operands(*names)), names)
    taken = {f"w{i}": m.registers[f"w{i}"] for i in range(16)}
    dq = np.random.default_rng(2).standard_normal((BLOCK, 64)).astype(np.float32)
    rows, columns = fragment()
    held = {f"v{i}": dq[rows[i], columns[i]].view(np.uint32).astype(np.int64) for i in range(32)}
    factor = np.float32(0.37)
    names = taken | held | {"factor": int(factor.view(np.uint32))}
    inputs = (("factor",), tuple(held), tuple(taken))
    m.run(gdpa_backward_norm._add.fn(([f"s{i}" for i in range(32)],), inputs), names)
    expected = (dq.astype(np.float64) * factor + floats(words)[:, 64 * W : 64 * W + 64]).astype(np.float32)
    for i in range(32):
        found = (m.registers[f"s{i}"] & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
        assert np.array_equal(found, expected[rows[i], columns[i]])


def fragment():
    """Row and column of each of the 32 values of a thread in an accumulator of 64 columns."""
    t = np.arange(128)
    row = 16 * (t // 32) + t % 32 // 4
    column = 2 * (t % 4)
    return [row + 8 * (i // 2 % 2) for i in range(32)], [column + 8 * (i // 4) + i % 2 for i in range(32)]


# ---- its text --------------------------------------------------------------------------------------------------------


class Panels:
    """Keys and values as 8 tiles of 64 columns, of memory that is filled later."""

    def __init__(self, place):
        self.data = place.data

    def index(self, i):
        return Place(self.data[i // 2][:, 64 * (i % 2) : 64 * (i % 2) + 64])


class Keys(Place):
    def index(self, i):
        return Place(self.data[i])

    def reinterpret(self, dtype, shape, layout):
        return Panels(self)


class Facts(dict):
    def __getitem__(self, i):
        return super().__getitem__(getattr(i, "value", i))


def offsets_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


class Attend:
    """Programs of one launch, one after another: each needs only what those before it leave."""

    def __init__(self, q_lengths, k_lengths, heads, inner, code, seed):
        self.q_lengths, self.k_lengths, self.heads, self.inner, self.code = q_lengths, k_lengths, heads, inner, code
        g = np.random.default_rng(seed)
        T, U, D = sum(q_lengths) + 5, sum(k_lengths), heads * WIDTH
        self.q, self.grad = (bf16(g.standard_normal((T, D))) for _ in range(2))
        self.k, self.v = (bf16(g.standard_normal((U, D)) * 0.2) for _ in range(2))
        self.q[T - 5 :] = self.grad[T - 5 :] = np.nan
        self.rows = np.stack([g.standard_normal(T), g.uniform(0.5, 2, T)], 1).astype(np.float32)
        self.weight, self.bias = g.standard_normal((2, D)).astype(np.float32)
        self.dk, self.dv = (np.full((U, D), np.inf, np.float32) for _ in range(2))
        self.half, self.left = np.float32(0.11), {}

    def expected(self):
        hat = bf16((self.q - self.rows[:, :1]) * self.rows[:, 1:] * self.weight + self.bias)
        shape = (-1, self.heads, WIDTH)
        tensors = [torch.from_numpy(np.nan_to_num(x)).view(shape) for x in (self.grad, hat, self.k, self.v)]
        offsets = [torch.from_numpy(offsets_of(n)) for n in (self.q_lengths, self.k_lengths)]
        attention = Attention((gdpa_backward.ACTIVATIONS[self.code],), 2 * float(self.half), False, None)
        grads = grouped_backward(*tensors, *offsets, attention)
        dq, dk, dv = (g.flatten(1).numpy() for g in grads)
        live = sum(self.q_lengths)
        if self.inner:
            dq[:live] += self.grad[:live]
        return dq, dk, dv

    def run(self, programs, seed):
        """(dq, dk, dv), the first in the gradient's memory."""
        wide = [np.concatenate([x, np.full((128, x.shape[1]), np.nan, np.float32)]) for x in (self.k, self.v)]
        self.read = wide
        self.dq = self.grad.copy()
        for program in range(programs):
            self.program(Machine(seed + program), program, programs)
        return self.dq, self.dk, self.dv

    def program(self, machine, program, programs):
        names = self.names(machine, program)
        facts = self.facts(names, program, programs)
        shapes = dict(k=(4, BLOCK, WIDTH), v=(4, BLOCK, WIDTH), q=(2, BLOCK, WIDTH), do=(2, BLOCK, WIDTH))
        shapes |= dict(t=(2, BLOCK, 64), dq=(2, BLOCK, 64), terms=(2, BLOCK, 2))
        s = {n: (Keys if n == "k" else Place)(np.full(shape, np.nan, np.float32)) for n, shape in shapes.items()}
        s["t"].layout = None
        bars = [machine.bars(2, n) for n in (1, 8, 33, 8)]
        t_full, t_free, normed = (machine.bars(1, 8)[0] for _ in range(3))
        notes = {}
        names["note_part"] = lambda _, place, *numbers: notes.__setitem__(place, numbers)
        names["note"] = lambda _, place, i: int(notes[place][i])
        maps = [Descriptor(x, (BLOCK, WIDTH)) for x in (self.q, *self.read, self.dq)]
        stores = [Descriptor(x, (BLOCK, n)) for x, n in ((self.dq, 64), (self.dk, WIDTH), (self.dv, WIDTH))]
        shared = (s["k"], s["v"], s["q"], s["do"])
        loader = (1, lambda: names["loader"](*maps, *shared, facts, notes, *bars, s["terms"], True))
        workers = [
            (4, lambda W=W: names["consumer"](
                *stores, *shared, s["t"], s["dq"], facts, notes, *bars, t_full, t_free, self.half, W, self.code,
                s["terms"], normed, True, self.inner,
            )) for W in range(2)
        ]  # fmt: skip
        with np.errstate(all="ignore"):
            machine.run(loader, *workers)

    def facts(self, names, program, programs):
        q_offsets, k_offsets = offsets_of(self.q_lengths), offsets_of(self.k_lengths)
        batch = len(self.q_lengths)
        total = (int(q_offsets[-1]) + 64 * batch) * self.heads
        units = -(-total // BLOCK)
        cuts = []
        for p in (program, program + 1):
            cuts += names["cut"](Pointer(q_offsets), 1, batch, self.heads, min(p * units // programs * BLOCK, total))
        keys = ["Q_OFFSETS", "K_OFFSETS", "Q_STEP", "K_STEP", "BATCH", "MOST", "FIRST", "FIRST_QUERY", "LAST"]
        numbers = (q_offsets, k_offsets, 1, 1, batch, 128, *map(int, cuts))
        return Facts({names[k]: v for k, v in zip([*keys, "LAST_QUERY"], numbers)})

    def names(self, machine, program):
        def clear(tile, rows, _):
            tile.data[max(rows, 0) :] = 0

        def keep_rows(tile, place, _):
            place.data[:] = bf16(tile)

        def send_block(desc, place, _, row, column, rows, *more):
            if rows < BLOCK:
                desc.matrix[row : row + rows, column : column + 64] = place.data[:rows]
            else:
                machine.async_store(desc, [row, column], place)

        def store_rows(tile, _, tensor, row, column, rows):
            to = self.dk if tensor == names["DK"] else self.dv
            rows = min(max(rows, 0), BLOCK)
            to[row : row + rows, column : column + WIDTH] = bf16(tile)[:rows]

        def leave(dk, dv, _, W):
            self.left[program, W] = dk.copy(), dv.copy()

        def add_left(dk, dv, _, W):
            more = self.left.pop((program - 1, W))
            return values(dk + more[0]), values(dv + more[1])

        def clear_slack(_, tensor, *more):
            if tensor == names["DQ"]:
                self.dq[sum(self.q_lengths) :] = 0

        def fetch_terms(terms, bar, _, row, rows):
            def deliver():
                n = min(rows, BLOCK)
                terms.data[:n] = self.rows[row : row + n]
                bar.add(32)

            machine.mail.append(deliver)

        def normalise_block(q, do, terms, bar, phase, normed, column, rows, _, W):
            bar.wait(phase)
            at = slice(column + 64 * W, column + 64 * W + 64)
            hat = (q.data[:, 64 * W : 64 * W + 64] - terms.data[:, :1]) * terms.data[:, 1:]
            hat = bf16(hat * self.weight[at] + self.bias[at])
            hat[max(rows, 0) :] = 0
            q.data[:, 64 * W : 64 * W + 64] = hat
            if rows < BLOCK:
                clear(do, rows, None)
            machine.arrive(normed)

        stand_ins = dict(
            clear=clear, keep_rows=keep_rows, send_block=send_block, store_rows=store_rows, leave=leave,
            add_left=add_left, clear_slack=clear_slack, fetch_terms=fetch_terms, normalise_block=normalise_block,
            take_block=lambda do, _, W: values(do.data[:, 64 * W : 64 * W + 64].copy()),
            release_block=lambda bar, past, _: machine.arrive(bar),
            add_block=lambda dq, factor, past: values(dq * factor + past),
            whole=lambda facts, i: facts[i], pointer=lambda facts, i, dtype: Pointer(facts[i]),
            gl=SimpleNamespace(**vars(LANGUAGE), static_range=range),
        )  # fmt: skip
        names = machine.names(gdpa_backward_ranges, gdpa_backward_kernels, **stand_ins)
        return names


def attend(seed, inner):
    rng = random.Random(seed)
    batch = rng.randrange(1, 6)
    q_lengths = [rng.choice((0, 1, 63, 64, 65, 128, 200, 450)) for _ in range(batch)]
    k_lengths = [rng.choice((0, 1, 64, 127, 128, 128)) for _ in range(batch)]
    return Attend(q_lengths, k_lengths, rng.randrange(1, 4), inner, GELU, seed), rng.randrange(1, 4)


@pytest.mark.parametrize("seed", range(8))
def test_its_text_over_arrays(seed, monkeypatch):
    """dQ over the gradient it is made of; programs that share sequences."""
    monkeypatch.setattr(Values, "type", SimpleNamespace(layout=None), raising=False)
    case, programs = attend(seed, bool(seed % 2))
    expected = case.expected()
    found = case.run(programs, seed)
    for name, a, b in zip(("dq", "dk", "dv"), found, expected):
        assert np.isfinite(a).all(), name
        assert np.abs(a - b).max(initial=0) <= 0.02 * np.abs(b).max(initial=1), name
