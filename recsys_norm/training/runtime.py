"""Processes: who we are, what all ranks agree on, devices, seeds and signals."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recsys_norm.training.config import Config, ConfigError
from recsys_norm.training.health import Health, RankError

_NCCL_GRACE = datetime.timedelta(seconds=60)  # NCCL's watchdog ends the process without a word on the cause
_starts = itertools.count()  # all ranks start the same jobs, so each job has a name for its keys in the store


class Stopped(Exception):
    """A signal asked the run to stop and it did, after saving a checkpoint."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signal = signum


class RunError(RuntimeError):
    """Training cannot go on. The message names the step, the cause and the way out."""


def expected_errors() -> tuple[type[BaseException], ...]:
    """Errors whose message alone tells the user what to do."""
    from recsys_norm.ops.registry import UnsupportedError

    return ConfigError, RunError, RankError, UnsupportedError


@dataclass(frozen=True)
class World:
    """The processes of a run as torchrun started them; `store` is shared by all of them (None for one process)."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    store: dist.Store | None = None


@functools.cache
def world() -> World:
    """Read once per process: all jobs of a sweep share it."""
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in variables):
        return World()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(iter(dist.rendezvous("env://")))
    return World(rank, int(os.environ.get("LOCAL_RANK", rank)), size, store)


@functools.cache
def run_stamp() -> str:
    """`<date>/<time>` of the start, the same on all ranks, also after torchrun restarted them."""
    stamp = datetime.datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    store = world().store
    if store is None:
        return stamp
    if isinstance(store, dist.PrefixStore):  # of a restart of its own
        store = store.underlying_store
    if world().rank == 0:
        return store.compare_set("run_stamp", "", stamp).decode()
    return store.get("run_stamp").decode()  # waits for rank 0


@dataclass
class Runtime:
    """A job's process group and device. `cpu_group` carries small host tensors; None in a single process."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype  # of activations
    cpu_group: dist.ProcessGroup | None = None
    signals: list[int] = field(default_factory=list)  # received so far
    health: Health = field(default_factory=lambda: Health(None, 0, 1, 0.0))
    group: dist.ProcessGroup | None = None  # of the tables and the dense part; None: the default one

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a CPU tensor over all ranks, as a new tensor."""
        values = values.clone()
        if self.cpu_group is not None:
            dist.all_reduce(values, group=self.cpu_group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's picklable value, on every rank."""
        if self.cpu_group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.cpu_group)
        return box[0]

    def gather(self, values: Tensor) -> Tensor | None:
        """CPU tensors of different lengths, concatenated in the order of ranks, on rank 0; None elsewhere."""
        if self.cpu_group is None:
            return values
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(values)
        lengths = self.sum(lengths).tolist()
        padded = values.new_zeros((max(lengths), *values.shape[1:]))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in lengths] if self.main else None
        dist.gather(padded, parts, dst=0, group=self.cpu_group)
        return torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)]) if self.main else None

    def barrier(self) -> None:
        if self.cpu_group is not None:
            dist.barrier(group=self.cpu_group)


@contextlib.contextmanager
def start(config: Config, job: int = 0) -> Iterator[Runtime]:
    """The process group for one job: NCCL on CUDA, gloo on CPU, also for a single process (TorchRec needs one).

    Jobs of a sweep that run in processes of their own share torchrun's store; `job` tells their keys apart.
    An error that comes from another rank's leaves as a RankError, see `health`.
    """
    where = world()
    if where.size > 1 and config.distributed.mode == "single":
        raise ConfigError(
            f"distributed.mode: 'single' is for one process and torchrun started {where.size}; add distributed=torchrec"
        )
    device = _device(config.trainer.device, where.local_rank)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store keeps what died processes left there
    name = f"restart{restart}/job{job}-{next(_starts)}"
    store = dist.HashStore() if where.store is None else dist.PrefixStore(name, where.store)
    timeout = datetime.timedelta(seconds=config.distributed.timeout_s)
    cuda = device.type == "cuda"
    with Health(store, where.rank, where.size, config.distributed.timeout_s) as health:
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=where.rank,
            world_size=where.size,
            timeout=timeout + _NCCL_GRACE if cuda else timeout,
            device_id=device if cuda else None,
            pg_options=_urgent() if cuda else None,
        )
        try:
            cpu_group = None
            if where.size > 1:
                cpu_group = dist.new_group(backend="gloo", timeout=timeout) if cuda else dist.group.WORLD
            dtype = _dtype(config.trainer.precision, device)
            runtime = Runtime(where.rank, where.size, device, dtype, cpu_group, health=health)
            with _watch_signals(runtime.signals), _named_cause(health), _switches(config):
                yield runtime
        finally:
            _leave(abort=cuda and where.size > 1 and sys.exc_info()[0] is not None)


def _urgent() -> Any:
    """NCCL's kernels come first where multiprocessors fall free: a rank's wait for them is every rank's."""
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


@contextlib.contextmanager
def _named_cause(health: Health) -> Iterator[None]:
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        cause = health.cause(error)
        if cause is error:
            raise
        with contextlib.suppress(ValueError):  # torchrun ends the others when one dies: let this one say why first
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise cause from error


def _leave(*, abort: bool) -> None:
    """End the process group. NCCL's is aborted after an error: its destruction would wait for the peers."""
    if abort:
        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _switches(config: Config) -> Iterator[None]:
    """PyTorch's global switches for one job, put back afterwards."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device: 'cuda' was asked for and this PyTorch sees no CUDA device; use cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(f"torchrun started more processes on this machine than its {count} CUDA devices")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]


@contextlib.contextmanager
def _watch_signals(received: list[int]) -> Iterator[None]:
    """Collect SIGTERM and SIGINT; the loop stops at the next step. A second SIGINT interrupts at once."""

    def handle(signum: int, frame: Any) -> None:
        if signum == signal.SIGINT and signum in received:
            raise KeyboardInterrupt
        received.append(signum)

    before = {}
    for signum in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError):  # not the main thread: somebody else handles signals there
            before[signum] = signal.signal(signum, handle)
    try:
        yield
    finally:
        for signum, handler in before.items():
            if signal.getsignal(signum) is handle:
                signal.signal(signum, handler)


@contextlib.contextmanager
def ignored_signals() -> Iterator[None]:
    """Processes started inside ignore SIGTERM and SIGINT: they end with their parent, which finishes its step first."""
    before = {}
    for signum in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError):
            before[signum] = signal.signal(signum, signal.SIG_IGN)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def seed_everything(seed: int) -> None:
    """Python, NumPy and PyTorch; the same on every rank, so that the dense part starts the same."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """The generators of this process, as plain values and tensors."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextlib.contextmanager
def kept_rng() -> Iterator[None]:
    """Whatever is drawn inside leaves this process's generators as they were."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
