"""The Hopper backward without a GPU: how the rows of a weight gradient are divided, and what the kernels refuse."""

import itertools
import types

import pytest
import torch
from op_cases import SHARED_SPLITS

from recsys_norm.kernels.hopper import backward, dgrad, launch, lazy, wgrad
from recsys_norm.kernels.hopper.lazy import tma_ready

FAMILIES = ("dgrad_kernels", "wgrad_kernels", "wgrad_finish_kernels")


@pytest.mark.parametrize("M", [1, 64, 65, 8192, 262144, (1 << 31) - 200])
@pytest.mark.parametrize("N,K", [(8, 8), (256, 256), (384, 384), (760, 1128), (2048, 512), (2048, 2048), (8192, 8192)])
def test_every_row_belongs_to_one_split(M, N, K):
    p = wgrad.plan(M, N, K, 132)
    assert p.steps * wgrad.STEP >= M > (p.steps - 1) * wgrad.STEP
    assert p.per_split * p.splits >= p.steps > p.per_split * (p.splits - 1)  # none is empty
    assert p.tiles * wgrad.TILE_ROWS * p.columns >= N * K
    assert p.splits == 1 or p.programs <= wgrad.MAX_WAVES * 132


def test_three_tiles_of_128_columns_are_two_of_192():
    assert wgrad.plan(262144, 384, 384, 132).columns == 192
    assert wgrad.plan(262144, 512, 512, 132).columns == 256


def shares(p):
    """Of each program: its tiles and slots, as the kernel finds them."""
    for program in range(p.programs):
        split, rank = divmod(program, p.tiles)
        tiles = range(rank, p.tiles, min(p.programs - split * p.tiles, p.tiles))
        yield tiles, range(split * p.per_split, min((split + 1) * p.per_split, p.steps)), split


@pytest.mark.parametrize("M", [1, 65, 8192, 30000, 262144])
@pytest.mark.parametrize("N,K", [(8, 8), (256, 256), (384, 384), (512, 512), (1536, 512), (1024, 1024), (2048, 2048)])
def test_programs_cover_every_slot_of_every_tile_once(M, N, K):
    p = wgrad.plan(M, N, K, 132)
    assert p.splits * p.tiles >= p.programs > (p.splits - 1) * p.tiles
    seen = {}
    for tiles, slots, split in shares(p):
        assert len(tiles) and len(slots) and split < p.splits
        for tile in tiles:
            seen.setdefault(tile, []).append((split, slots))
    assert sorted(seen) == list(range(p.tiles))
    for parts in seen.values():
        assert [s for s, _ in parts] == list(range(p.splits))  # one partial of each split
        assert [i for _, slots in parts for i in slots] == list(range(p.steps))


@pytest.mark.parametrize("N,K", [(512, 512), (1024, 512), (1536, 512), (1024, 1024), (512, 2048)])
def test_a_shared_split_leaves_no_multiprocessor_idle(N, K):
    p = wgrad.plan(262144, N, K, 132)
    assert p.programs == 132
    longest = max(len(tiles) * (len(slots) + wgrad.TILE_STEPS) for tiles, slots, _ in shares(p))
    assert longest <= p.per_split + wgrad.TILE_STEPS  # that of a whole split
    assert p.per_split <= 1.005 * p.tiles * p.steps / 132 + 8  # nearly what an exact division would give
    assert p.per_split < p.steps / (132 // p.tiles)  # what whole splits in one wave take


@pytest.mark.parametrize("M,K,N", SHARED_SPLITS)
def test_where_programs_share_a_split(M, K, N):
    p = wgrad.plan(M, N, K, 132, wgrad.TILE_COLUMNS[:1] if K > 512 else wgrad.TILE_COLUMNS)
    assert p.programs == 132 and p.splits == 132 // p.tiles + 1


def test_a_shared_split_must_be_worth_its_partial():
    p = wgrad.plan(20000, 1024, 1024, 132)
    assert (p.programs, p.splits, p.per_split) == (128, 4, 79)  # 77 slots, but a fifth partial of 4 MB


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_plan_reaches_the_kernels(norm, monkeypatch):
    calls, kernels = [], launch.manifest()["90"]["kernels"]

    def get(name):
        return lambda grid, *args, **options: calls.append(
            (name, grid, dict(zip((p["name"] for p in kernels[name]["params"]), args)))
        )

    monkeypatch.setattr(launch, "get", get)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    x, dy = (torch.zeros(262144, 512, dtype=torch.bfloat16, device="meta") for _ in range(2))
    weight, rstd = torch.zeros(512, 512, dtype=torch.bfloat16, device="meta"), torch.zeros(262144, device="meta")
    wgrad.gradients(dy, x, weight, None, None, None, norm == "layer", rstd, 1e-5)
    name, grid, args = calls[0]
    assert name == f"dw_{norm}_bf16_256" and grid == 132
    assert args["partial_ptr"].shape[0] * args["steps_per_split"] >= args["steps"] == 4096
    assert len(args["sums_ptr"]) == len(args["partial_ptr"]) * args["col_tiles"]
    assert calls[1][2]["splits"] == len(args["partial_ptr"])


def test_what_it_refuses():
    assert backward.why_not(torch.bfloat16, 512, 512) is None
    assert backward.why_not(torch.float16, 8, 8192) is None
    assert "float32" in backward.why_not(torch.float32, 512, 512)
    assert "20 in-features" in backward.why_not(torch.bfloat16, 20, 512)
    assert "x has 8200" in backward.why_not(torch.bfloat16, 8200, 512)


def test_tma_gets_a_copy_of_what_it_cannot_read():
    wide = torch.randn(16, 40).bfloat16()
    assert tma_ready(wide[:, 8:24]).data_ptr() == wide[:, 8:24].data_ptr()
    odd = torch.randn(1, 41).bfloat16()  # of one row; contiguous() leaves the stride of 41
    for view in (wide[:, 1:17], wide.t(), wide[:, ::5], wide[:1].expand(16, -1), odd[:, :16], odd[:, 8:24]):
        ready = tma_ready(view)
        assert torch.equal(ready, view)
        assert ready.data_ptr() % 16 == 0 and ready.stride(1) == 1
        assert ready.stride(0) % 8 == 0 and ready.stride(0) >= ready.shape[1]


def test_every_form_has_a_kernel():
    kernels = launch.manifest()["90"]["kernels"]
    for K in (8, 128, 136, 256, 264, 384, 392, 512, 520, 8192):
        for whole in (True, False) if K <= 512 else (False,):
            form = dgrad.form_of(K, whole)
            for norm, dtype, extra in itertools.product(("rms", "layer"), ("bf16", "fp16"), ("", "_add")):
                # With a sum the two CTAs that share W' in "any" could wait for each other for ever.
                cluster = 2 if form in ("384", "512", "any") and form + extra != "any_add" else 1
                assert kernels[f"dx_{norm}_{dtype}_{form}{extra}"]["cluster"] == cluster
    with pytest.raises(ValueError, match="rows of 520 exceed the 512"):
        dgrad.form_of(520, True)


@pytest.fixture
def launches(monkeypatch):
    """Names and arguments of the kernels that would run; their results stay as allocated."""
    calls, kernels = [], launch.manifest()["90"]["kernels"]

    class Kernel:
        def __init__(self, name):
            self.name, self.entry = name, kernels[name]

        def __call__(self, grid, *args, **options):
            assert len(args) == len(self.entry["params"]), self.name
            calls.append((self.name, dict(zip((p["name"] for p in self.entry["params"]), args))))

    monkeypatch.setattr(launch, "get", Kernel)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    return calls


def test_no_kernel_spills():
    kernels = launch.manifest()["90"]["kernels"]
    mine = {n: k for n, k in kernels.items() if k["module"] in FAMILIES}
    assert len(mine) > 20
    assert {n: k["spills"] for n, k in mine.items() if k["spills"]} == {}


def saved_for(norm, M=70, K=64, N=32, dtype=torch.bfloat16, param_dtype=torch.float32):
    x, y = torch.zeros(M, K, dtype=dtype), torch.zeros(M, N, dtype=dtype)
    weight, bias, vector = (torch.zeros(*s, dtype=param_dtype) for s in ((N, K), (N,), (K,)))
    mean = torch.zeros(M) if norm == "layer" else None
    return (x, weight, bias, vector, vector if norm == "layer" else None, mean, torch.ones(M), y)


@pytest.mark.parametrize("K", [64, 520])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_gradients_share_no_memory_with_each_other(norm, K, launches):
    saved = saved_for(norm, K=K)
    needs = (True, True, True, True, norm == "layer")
    grads = backward.backward(norm, 1e-5, saved, torch.zeros(70, 32, dtype=torch.bfloat16), needs)
    assert [g is not None for g in grads] == list(needs)
    places = [g.untyped_storage().data_ptr() for g in grads if g is not None]
    assert len(set(places)) == len(places)


def test_a_further_gradient_of_x_reaches_the_kernel_of_its_form(launches):
    dy, add = torch.zeros(70, 32, dtype=torch.bfloat16), torch.zeros(70, 128, dtype=torch.bfloat16)[:, :64]
    for given in (None, add):
        backward.backward("rms", 1e-5, saved_for("rms"), dy, (True, False, False, False, False), given)
    (plain, _), (added, args) = [call for call in launches if call[0].startswith("dx_")]
    assert (plain, added) == ("dx_rms_bf16_128", "dx_rms_bf16_128_add")
    assert args["add_desc"].data_ptr() == add.data_ptr() and args["add_desc"].stride() == (128, 1)


@pytest.mark.parametrize("eps,limit", [(1e-5, 316.227), (0.0, float("inf"))])
def test_the_limit_of_constant_rows_follows_eps(eps, limit, launches):
    dy = torch.zeros(70, 32, dtype=torch.bfloat16)
    backward.backward("layer", eps, saved_for("layer"), dy, (False, True, False, False, False))
    args = next(args for name, args in launches if name.startswith("dw_layer"))
    assert args["limit"] == pytest.approx(limit, rel=2e-6)
    assert args["x_ptr"].shape == (70, 64) and args["stride_x"] == 64


PIECES = [((512,) * 3, 512, True), ((64, 64), 8, True), ((72, 72), 64, False), ((64, 128), 64, False),
          ((64, 64), 520, False), ((64,) * 4, 64, False)]  # fmt: skip


@pytest.mark.parametrize("widths,K,fits", PIECES)
def test_which_pieces_of_dy_the_kernels_read(widths, K, fits):
    given = [torch.ones(3, width, dtype=torch.bfloat16) for width in widths]
    assert dgrad.fits_in_pieces(given, K) == fits
    if fits:
        found, piece, N = dgrad.pieces(given)
        assert len(found) == 3 and all(a is b for a, b in zip(found, given)) and (piece, N) == (widths[0], sum(widths))


def test_a_dy_that_lies_in_one_is_its_own_first_piece():
    dy = torch.ones(3, 136, dtype=torch.bfloat16)
    found, piece, N = dgrad.pieces(dy)
    assert all(t is dy for t in found) and piece >= N == 136


@pytest.mark.parametrize("more", [False, True])
def test_the_technique_hands_pieces_and_a_further_gradient_on(more, launches):
    pieces = tuple(torch.zeros(70, 64, dtype=torch.bfloat16) for _ in range(2))
    add = torch.zeros(70, 64, dtype=torch.bfloat16)
    problem = types.SimpleNamespace(eps=1e-5, dtype=torch.bfloat16, norm="rms")
    needs = (True, True, False, True, False)
    grads = lazy.Lazy().backward(problem, saved_for("rms", N=128), (pieces, add) if more else (pieces,), needs)
    assert [g is not None for g in grads] == list(needs)
    reading = [(name, args) for name, args in launches if name.startswith(("dx_", "dw_rms"))]
    assert len(reading) == 2
    for name, args in reading:
        assert [args[f"dy{i}_desc"].data_ptr() for i in range(2)] == [piece.data_ptr() for piece in pieces]
        assert args["piece"] == 64 and name.endswith("_add") == (more and name.startswith("dx_"))


@pytest.mark.parametrize("M", [70, 1000, 40000])
def test_tiles_of_wide_rows_with_and_without_a_further_gradient(M, launches):
    """A cluster of two CTAs takes 256 rows, one that adds, and is alone, 128."""
    x, dy, rstd = (torch.zeros(s, dtype=torch.bfloat16, device="meta") for s in ((M, 520), (M, 64), (M,)))
    for add in (None, x):
        dgrad.dx(dy, dy.new_empty(64, 520), x, None, rstd, rstd, add)
    assert [name for name, _ in launches] == ["dx_rms_bf16_any", "dx_rms_bf16_any_add"]
    for (_, args), rows in zip(launches, (256, 128)):
        assert args["col_tiles"] == 3 and args["tiles"] == 3 * -(-M // rows)


@pytest.mark.parametrize("current,made_current", [(None, True), (0, True), (1, False)])
def test_a_thread_gets_the_devices_context_only_without_one(current, made_current, monkeypatch):
    """Tensor maps are made on autograd's threads too, on which nothing may have run yet; one of the caller's stays."""
    made = []
    driver = types.SimpleNamespace(
        cuCtxGetDevice=lambda: (201, None) if current is None else (0, current),
        cuDeviceGet=lambda index: (0, index),
        cuDevicePrimaryCtxRetain=lambda device: (0, f"primary {device}"),
        cuCtxSetCurrent=lambda context: made.append(context) or (0,),
    )
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    launch._primary_context.cache_clear()
    launch._ensure_context(1)
    launch._primary_context.cache_clear()
    assert made == (["primary 1"] if made_current else [])
