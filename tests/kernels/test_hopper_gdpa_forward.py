"""The Hopper forward of jagged attention without a GPU: which tensors it takes, what it hands to its kernel, how its
programs share the work, and its text over numpy arrays."""

import random

import numpy as np
import pytest
import torch
from gluon_model import Descriptor, Machine, Place, Pointer, bf16, kernels
from ptx_model import Machine as Warpgroup
from ptx_model import to_bf16

from recsys_norm.kernels.gdpa import launch as gdpa
from recsys_norm.kernels.hopper import (
    gdpa_backward_ranges,
    gdpa_forward,
    gdpa_forward_moves,
    gdpa_forward_ranges,
    launch,
)
from recsys_norm.ops.activations import get

gdpa_forward_kernels = kernels("gdpa_forward_kernels")
GELU = get("gelu").code
BLOCK, WIDTH = 64, 128


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(launch, "_driver_version", lambda: 13000)
    launch.why_not.cache_clear()
    yield
    launch.why_not.cache_clear()


def tensors(T=70, U=40, heads=2, d=128, dtype=torch.bfloat16):
    return tuple(torch.randn(rows, heads, d).to(dtype) for rows in (T, U, U))


# ---- the host's side -------------------------------------------------------------------------------------------------


def fits(q, k, v, code=GELU, max_keys=128, arch=90, sequences=3):
    return gdpa_forward.fits((q, k, v), sequences, code, max_keys, arch)


def test_what_it_takes(driver):
    q, k, v = tensors()
    assert fits(q, k, v) and fits(q, k, v, get("gelu_tanh").code) and fits(*tensors(T=1, heads=1))
    assert not fits(q, k, v, get("silu").code)
    assert not fits(q, k, v, max_keys=129)
    assert not fits(q, k, v, arch=80)
    assert not fits(q, k, v, sequences=1 << 22)
    assert not fits(*tensors(dtype=torch.float16)) and not fits(*tensors(d=64))


def test_which_strides_it_takes(driver):
    q, k, v = tensors()
    pair = torch.stack([k, v], 1)
    assert fits(q, pair[:, 0], pair[:, 1])
    assert fits(torch.cat([q, q], 1)[:, 1:3], k, v)
    assert not fits(q[:1].expand(q.shape), k, v)
    assert not fits(q.transpose(0, 1).contiguous().transpose(0, 1), k, v)
    shifted = torch.cat([k.new_zeros(1), k.flatten()])[1:].view_as(k)
    assert not fits(q, shifted, v)


@pytest.mark.parametrize("T,U", [(70, 40), (70, 0), (100_000, 40)])
def test_what_the_kernel_gets(T, U, monkeypatch):
    calls = []
    monkeypatch.setattr(launch, "get", lambda name: lambda *a, **options: calls.append((name, a, options)))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    q, k, v = tensors(T, U)
    offsets = torch.tensor([0, 1, T]), torch.tensor([0, 1, U])
    gdpa_forward.forward((q, k, v, torch.empty_like(q)), *offsets, GELU, 100, 0.5)
    ((name, (programs, *args), options),) = calls
    entry = launch.manifest()["90"]["kernels"][name]
    assert len(args) == len(entry["params"]) and not options
    for parameter, a in zip(entry["params"], args):
        if parameter["kind"] == "tile":
            assert a.dim() == 2 and a.shape[0] > 0 and a.shape[1] == 256 and a.stride(1) == 1
        else:
            assert isinstance(a, torch.Tensor) == (parameter["kind"] == "pointer")
    named = dict(zip((p["name"] for p in entry["params"]), args))
    assert named["q_step"] == 2 and named["most"] == 100 and named["half_scale"] == 0.25 and named["pitch"] == 256
    assert programs == (132 if T == 100_000 else 2 * (T + 256) // 192)


def test_the_op_uses_it_where_it_fits(driver, monkeypatch):
    calls = []
    monkeypatch.setattr(gdpa_forward, "forward", lambda *a: calls.append(a))
    monkeypatch.setattr(gdpa, "device_of", lambda tensor: (90, 132))
    monkeypatch.setattr(gdpa, "_is_plain", lambda q, spec: len(spec.runs) == 1 and not spec.masked)
    q, k, v = tensors()
    offsets = torch.tensor([0, 1, 70]), torch.tensor([0, 1, 40])

    class Stock(dict):
        def __missing__(self, grid):
            return lambda *a, **options: calls.append(None)

    monkeypatch.setattr(gdpa.forward_kernels, "forward_resident", Stock())
    for code, left, special in ((GELU, None, 1), (6, None, 0), (GELU, 3, 0)):
        gdpa.forward(q, k, v, *offsets, gdpa.Spec(69, 39, [(0, 2, code)], 1.0, left, None))
        assert (calls.pop() is not None) == bool(special) and not calls


def test_every_activation_has_a_kernel_that_fits():
    for activation in gdpa_forward.ACTIVATIONS.values():
        kernel = launch.manifest()["90"]["kernels"][f"gdpa_forward_{activation}_bf16"]
        assert kernel["cluster"] == 1 and kernel["spills"] == 0 and kernel["num_warps"] == 16
        # Their names and places are written into the text that prefetches them.
        assert kernel["entry"] == "gdpa_forward_kernel" and all(p["kind"] == "tile" for p in kernel["params"][:4])
    assert gdpa_forward_ranges.EXTRA.value == gdpa_forward.EXTRA


# ---- its text --------------------------------------------------------------------------------------------------------


def offsets_of(lengths, step=1):
    offsets = np.zeros((len(lengths) + 1) * step, np.int64)
    offsets[::step] = np.concatenate([[0], np.cumsum(lengths)])
    return offsets


class Facts(dict):
    def __getitem__(self, i):
        return super().__getitem__(getattr(i, "value", i))


def facts_of(names, q_lengths, k_lengths, heads, program, programs, step=1, most=128):
    q_offsets, k_offsets = offsets_of(q_lengths, step), offsets_of(k_lengths, step)
    batch = len(q_lengths)
    cuts = names["cuts"](Pointer(q_offsets), step, batch, heads, program, programs)
    keys = ["Q_OFFSETS", "K_OFFSETS", "Q_STEP", "K_STEP", "BATCH", "MOST", "FIRST", "FIRST_QUERY", "LAST", "LAST_QUERY"]
    return {names[k]: v for k, v in zip(keys, (q_offsets, k_offsets, step, step, batch, most, *map(int, cuts)))}


def names_of(machine, **more):
    modules = gdpa_backward_ranges, gdpa_forward_ranges, gdpa_forward_kernels
    more |= {"whole": lambda facts, i: facts[i], "pointer": lambda facts, i, dtype: Pointer(facts[i])}
    return machine.names(*modules, **more)


CASES = {
    "even": ([300, 20, 64, 1, 700], 3, 7),
    "empty ones": ([0, 0, 130, 0, 64, 63, 0], 2, 4),
    "nothing": ([0, 0, 0], 2, 2),
    "one": ([5], 1, 1),
    "more programs than blocks": ([70, 3], 2, 9),
    "long": ([9000, 1, 4000], 2, 132),
    "many": (np.random.default_rng(0).integers(0, 90, 2500).tolist(), 2, 132),
    "as in training": (np.random.default_rng(1).integers(1, 1024, 512).tolist(), 4, 132),
}


@pytest.mark.parametrize("case", CASES)
def test_programs_share_the_work(case):
    """Every query of every head is one program's, in pieces that begin at multiples of 64, and all have about the same."""
    lengths, heads, programs = CASES[case]
    names = names_of(Machine(0))
    offsets = offsets_of(lengths)
    taken = np.zeros((heads, sum(lengths)), np.int64)
    costs = []
    for program in range(programs):
        facts = facts_of(names, lengths, lengths, heads, program, programs, step=1 + program % 2)
        cost = 0
        for n in range(names["count_parts"](facts)):
            head, row, begin, end, key, keys = (int(x) for x in names["part"](facts, n))
            assert row == key and row in offsets and 0 <= begin <= end and begin % BLOCK == 0 and keys <= 128
            taken[head, row + begin : row + end] += 1
            cost += end - begin + gdpa_forward.EXTRA * (begin == 0)
        costs.append(cost)
    assert (taken == 1).all()
    mean = heads * (sum(lengths) + gdpa_forward.EXTRA * len(lengths)) / programs
    assert max(costs) <= mean + gdpa_forward.EXTRA + 2 * BLOCK


def run_kernel(q_lengths, k_lengths, heads, programs, seed, code=GELU, scale=0.5, slack=0):
    """(o, o of the formula) by the text of the loader and of the consumers."""
    g = np.random.default_rng(seed)
    T, U = sum(q_lengths), sum(k_lengths)
    q, k, v = (bf16(g.standard_normal((rows, heads * WIDTH))) for rows in (T + slack, U, U))
    q[T:] = np.nan
    o = np.full((T + slack, heads * WIDTH), np.inf, np.float32)
    k_read, v_read = (np.concatenate([x, np.full((128, heads * WIDTH), np.nan, np.float32)]) for x in (k, v))
    for program in range(programs):
        run_program(
            Machine(seed + program), q, k_read, v_read, o, q_lengths, k_lengths, heads, program, programs, code, scale
        )
    expected = np.zeros_like(o)
    q_at, k_at = offsets_of(q_lengths), offsets_of(k_lengths)
    activation = torch.nn.functional.gelu
    for b in range(len(q_lengths)):
        rows, keys = slice(q_at[b], q_at[b + 1]), slice(k_at[b], k_at[b + 1])
        for h in range(heads):
            at = slice(h * WIDTH, (h + 1) * WIDTH)
            s = torch.from_numpy(scale * (q[rows, at] @ k[keys, at].T))
            p = activation(s, approximate="tanh" if code == get("gelu_tanh").code else "none")
            expected[rows, at] = p.numpy() @ v[keys, at]
    return o, expected


def run_program(machine, q, k, v, o, q_lengths, k_lengths, heads, program, programs, code, scale):
    notes = {}

    def note_part(_, place, *values):
        notes[place] = values

    def clear_keys(tile, keys, _):
        tile.data[keys:] = 0

    def clear_slack(facts, *_):
        o[sum(q_lengths) + program :: programs] = 0

    def send_block(tile, desc, place, _, row, column, rows):
        place.data[:] = bf16(tile)
        if rows < BLOCK:
            desc.matrix[row : row + rows, column : column + WIDTH] = place.data[:rows]
        else:
            machine.async_store(desc, [row, column], place)

    names = names_of(
        machine, note_part=note_part, note=lambda _, place, i: notes[place][i], clear_keys=clear_keys,
        clear_slack=clear_slack, send_block=send_block,
    )  # fmt: skip
    consumers, slots = names["CONSUMERS"], names["SLOTS"]
    facts = facts_of(names, q_lengths, k_lengths, heads, program, programs)
    k_s, v_s, q_s = (
        Place(np.full((n, rows, WIDTH), np.nan, np.float32)) for n, rows in ((2, 128), (2, 128), (slots, BLOCK))
    )
    bars = machine.bars(2, 1), machine.bars(2, 4 * consumers), machine.bars(slots, 1), machine.bars(slots, 4)
    shared = (k_s, v_s, q_s, facts, notes, *bars)
    maps = [Descriptor(x, (rows, WIDTH)) for x, rows in ((q, BLOCK), (k, 128), (v, 128), (o, BLOCK))]
    loader = (1, lambda: names["loader"](*maps[:3], *shared))
    workers = [(4, lambda W=W: names["consumer"](maps[3], *shared, 0.5 * scale, W, code)) for W in range(consumers)]
    with np.errstate(all="ignore"):
        machine.run(loader, *workers)


def lengths_for(rng):
    batch = rng.randrange(1, 7)
    return [rng.choice((0, 1, 63, 64, 65, 128, 200, 500)) for _ in range(batch)], [
        rng.choice((0, 1, 64, 127, 128, 128)) for _ in range(batch)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_its_text_over_arrays(seed):
    rng = random.Random(seed)
    q_lengths, k_lengths = lengths_for(rng)
    heads, programs = rng.randrange(1, 4), rng.randrange(1, 4)
    code = get(("gelu", "gelu_tanh")[seed % 2]).code
    found, expected = run_kernel(q_lengths, k_lengths, heads, programs, seed, code, slack=5)
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max(initial=0) <= 0.02 * np.abs(expected).max(initial=1)


# ---- PTX by hand -----------------------------------------------------------------------------------------------------


def warpgroup():
    return Warpgroup(np.zeros(1 << 16, np.uint8), np.zeros(1 << 16, np.uint8))


def swizzled(words):
    """Rows of 128 16-bit values as TMA lays them: two panels of 64 columns, 16-byte pieces swizzled by the row."""
    rows = len(words)
    out = np.zeros((2, rows, 8, 8), np.uint16)
    for row in range(rows):
        for piece in range(8):
            out[:, row, piece ^ (row & 7)] = words[row].reshape(2, 8, 8)[:, piece]
    return out.view(np.uint8).reshape(-1)


@pytest.mark.parametrize("keys", [-3, 0, 1, 64, 127])
def test_keys_become_zeros(keys):
    m = warpgroup()
    words = np.random.default_rng(0).integers(1, 1 << 16, (128, 128)).astype(np.uint16)
    m.shared[8192:40960] = swizzled(words)
    m.shared[:8192] = m.shared[40960:] = 7
    m.run(gdpa_forward_moves._clear.fn((), (("tile",), ("rows",), ("zero",))), {"tile": 8192, "rows": keys, "zero": 0})
    words[max(keys, 0) :] = 0
    assert np.array_equal(m.shared[8192:40960], swizzled(words))
    assert (m.shared[:8192] == 7).all() and (m.shared[40960:] == 7).all()


@pytest.mark.parametrize("rows", [1, 8, 30, 63])
@pytest.mark.parametrize("pitch", [128, 200])
def test_rows_are_stored(rows, pitch):
    m = warpgroup()
    words = to_bf16(np.random.default_rng(0).standard_normal((BLOCK, WIDTH))).astype(np.uint16)
    m.shared[8192 : 8192 + 16384] = swizzled(words)
    operands = (("tile",), ("to",), ("pitch",), ("rows",), ("zero",))
    m.run(gdpa_forward_moves._copy_rows.fn((), operands), dict(tile=8192, to=512, pitch=pitch, rows=rows, zero=0))
    expected = np.zeros(1 << 15, np.uint16)
    for row in range(rows):
        expected[256 + row * pitch :][:WIDTH] = words[row]
    assert np.array_equal(m.memory.view(np.uint16), expected)


@pytest.mark.parametrize("name", gdpa_forward.ACTIVATIONS.values())
def test_activation(name):
    names = names_of(Machine(0))
    x = np.linspace(-12, 12, 4001)
    found = names["activation"](x / 2, get(name).code)
    expected = get(name).forward(torch.from_numpy(x)).numpy()
    assert np.abs(found - expected).max() < 1e-4
