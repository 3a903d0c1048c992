"""A model of Gluon kernels with partitions: their Python text runs over numpy arrays, one thread per partition. Copies by
TMA arrive later and in any order, so a place that is read too soon or written too soon shows in the results."""

import importlib
import random
import threading
import time
import types
from unittest import mock

import numpy as np
from triton.experimental import gluon

PATIENCE_S = 60


def kernels(name):
    """A source module of recsys_norm.kernels.hopper, also where Triton is older than the sources."""
    with mock.patch.object(gluon, "aggregate", lambda cls: cls, create=True):
        return importlib.import_module(f"recsys_norm.kernels.hopper.{name}")


class Values(np.ndarray):
    """Registers of a warpgroup: fp32, rounded where the kernel converts them."""

    def to(self, dtype):
        return dtype(self).view(Values)


def bf16(x):
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (((u + 0x7FFF + ((u >> 16) & 1)) >> 16 << 16).astype(np.uint32)).view(np.float32)


def values(x):
    return np.asarray(x, np.float32).view(Values)


class Pointer:
    def __init__(self, array, at=0):
        self.array, self.at = array, at

    def __add__(self, offset):
        return Pointer(self.array, self.at + offset)


class Place:
    """A tile in shared memory. It starts as NaN."""

    dtype = staticmethod(bf16)

    def __init__(self, data):
        self.data = data

    def index(self, i):
        return Place(self.data[i])

    def permute(self, order):
        return Place(self.data.transpose(order))


class Descriptor:
    """A tensor map: rows outside the tensor read as zeros and are not written."""

    def __init__(self, matrix, box):
        self.matrix, self.box, self.nbytes_per_cta = matrix, box, 2 * box[0] * box[1]

    def read(self, row, column):
        rows, columns = self.box
        tile = np.zeros(self.box, np.float32)
        part = self.matrix[row : row + rows, column : column + columns]
        tile[: len(part)] = part
        return tile

    def write(self, row, column, tile):
        part = self.matrix[row : row + len(tile), column : column + tile.shape[1]]
        part[:] = tile[: len(part)]


class Barrier:
    def __init__(self, machine, count):
        self.machine, self.count, self.pending, self.bytes, self.phase = machine, count, count, 0, 0

    def add(self, arrivals, size=0):
        with self.machine.changed:
            self.pending -= arrivals
            self.bytes += size
            assert self.pending >= 0, "too many arrivals"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.machine.changed.notify_all()

    def wait(self, parity):
        with self.machine.changed:
            passed = self.machine.changed.wait_for(lambda: self.phase & 1 != parity, PATIENCE_S)
        assert passed, "waits for ever"


class Bars(list):
    index = list.__getitem__


class Machine:
    """What partitions share. `run` executes functions at once; `env(modules, **more)` gives names to a kernel's text."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.changed = threading.Condition(threading.RLock())
        self.own = threading.local()
        self.mail, self.over, self.failures = [], False, []

    def bars(self, n, count):
        return Bars(Barrier(self, count) for _ in range(n))

    def expect(self, bar, size):
        bar.add(1, size)

    def arrive(self, bar):
        bar.add(self.own.warps)

    def async_load(self, desc, at, bar, place):
        def deliver():
            place.data[:] = desc.read(*at)
            bar.add(0, -desc.nbytes_per_cta)

        self.mail.append(deliver)

    def async_store(self, desc, at, place):
        done = threading.Event()
        self.own.stores.append(done)

        def deliver():
            desc.write(*at, place.data)
            done.set()

        self.mail.append(deliver)

    def store_wait(self, left):
        while len(self.own.stores) > left:
            assert self.own.stores.pop(0).wait(PATIENCE_S)

    def deliver(self):
        while not self.over or self.mail:
            if self.mail and self.random.random() < 0.3:
                self.mail.pop(self.random.randrange(len(self.mail)))()
            time.sleep(0)

    def run(self, *partitions):
        """Partitions are (warps, function)."""

        def start(warps, function):
            self.own.warps, self.own.stores = warps, []
            try:
                function()
            except BaseException as error:
                self.failures.append(error)

        threads = [threading.Thread(target=start, args=p, daemon=True) for p in partitions]
        post = threading.Thread(target=self.deliver, daemon=True)
        for thread in (*threads, post):
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        self.over = True
        post.join(PATIENCE_S)
        if self.failures:
            raise self.failures[0]
        assert not any(thread.is_alive() for thread in threads), "a partition does not end"

    def names(self, *modules, **more):
        """The functions and numbers of the modules as plain Python, over this machine; `more` stands in for some."""
        names = {"__builtins__": __builtins__, "gl": LANGUAGE}
        for name, value in ((n, v) for module in modules for n, v in vars(module).items()):
            function = getattr(value, "fn", None)
            if isinstance(function, types.FunctionType):
                names[name] = types.FunctionType(function.__code__, names, name, function.__defaults__)
            elif isinstance(getattr(value, "value", None), int):
                names[name] = value.value
        tma = types.SimpleNamespace(
            async_load=self.async_load, async_store=self.async_store, store_wait=self.store_wait
        )
        names |= {"tma": tma, "mbarrier": types.SimpleNamespace(expect=self.expect), "arrive": self.arrive}
        names |= {"await_phase": lambda bar, phase: bar.wait(phase), "fence_async_shared": lambda: None}
        names |= {"warpgroup_mma": multiply, "warpgroup_mma_wait": lambda n, deps: deps if len(deps) > 1 else deps[0]}
        names |= {"accumulator_layout": lambda columns: None, "tanh": np.tanh} | more
        return names


def multiply(a, b, acc, use_acc=True, is_async=False):
    product = (a.data if isinstance(a, Place) else np.asarray(a)) @ b.data
    return values(product + acc if use_acc else product)


def number(x):
    return int(x) if np.ndim(x) == 0 and not isinstance(x, Values) else x


def load(pointer, mask=None, other=0):
    if mask is None:
        return pointer.array[pointer.at]
    return np.where(mask, pointer.array[np.where(mask, pointer.at, 0)], other).view(Values)


LANGUAGE = types.SimpleNamespace(
    load=load,
    arange=lambda first, end, layout: np.arange(first, end).view(Values),
    where=lambda c, a, b: number(np.where(c, a, b)),
    minimum=lambda a, b: number(np.minimum(a, b)),
    maximum=lambda a, b: number(np.maximum(a, b)),
    sum=lambda x, axis: int(np.asarray(x).sum()),
    zeros=lambda shape, dtype, layout: values(np.zeros(shape)),
    convert_layout=lambda x, layout, assert_trivial: x,
    int32=lambda x: np.asarray(x).astype(np.int64),
    float32=lambda x: np.asarray(x, np.float32),
    BlockedLayout=lambda *a: None,
    DotOperandLayout=lambda **a: None,
    static_assert=lambda wanted: None,
    barrier=lambda: None,
)
