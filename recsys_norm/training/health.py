"""Which rank died or hangs, and where: named by the ranks that notice, before the launcher ends them.

Every rank posts signs of life into the store that torchrun's agent keeps, which outlives the processes. A rank that
waits for a dead one gets an error that does not say for whom it waited; the posts do.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

_INTERVAL = 0.5  # seconds between two signs of life
_PATIENCE = 3.0  # seconds without one after which a rank counts as dead
_GRACE = 5.0  # seconds that a rank which waits for a hanging one leaves it to end itself

# How c10d, gloo and NCCL say that a peer does not answer.
_LOST_PEER = re.compile(r"gloo|nccl|connection|broken pipe|timed? ?out|processgroup|process group|store", re.IGNORECASE)


class RankError(RuntimeError):
    """Another rank died, hangs or failed. The message names it and what it was doing."""


class Health:
    """Signs of life of this rank, and what the other ranks' say.

    The main thread calls `at` before whatever may take long. If it then makes no progress for `timeout_s`, the process
    ends itself with one line: a thread that hangs in C++ cannot be reached in another way. With one process nothing is
    watched.
    """

    def __init__(self, store: dist.Store | None, rank: int, size: int, timeout_s: float) -> None:
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._store = store.clone() if store is not None and size > 1 else None  # the main thread may block its own
        self._work, self._doing, self._since = 0, "starting", time.monotonic()
        self._beats = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Health:
        if self._store is not None:
            self._post()
            self._thread = threading.Thread(target=self._watch, name="health", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def at(self, doing: str) -> None:
        """What the main thread does next, such as "step 7"."""
        self._work, self._doing, self._since = self._work + 1, doing, time.monotonic()

    @contextmanager
    def unlimited(self, doing: str) -> Iterator[None]:
        """Inside, the main thread may take any time."""
        self.at(doing)
        self._since = math.inf
        try:
            yield
        finally:
            self.at("starting")

    def cause(self, error: BaseException) -> BaseException:
        """The error to report for one that was raised here: a RankError naming another rank where that is the cause.

        What has its cause here is noted for the other ranks.
        """
        if self._store is None or isinstance(error, RankError):
            return error
        self._since = math.inf  # asking takes its time; the watch must not take that for a hang
        message = self._culprit() if _lost_peer(error) else None
        if message is not None:
            return RankError(message)
        own = type(error).__module__.startswith("recsys_norm")  # its message says enough
        self._note(" ".join((str(error) if own else f"{type(error).__name__}: {error}").split()))
        return error

    # -- posts

    def _post(self) -> None:
        self._beats += 1
        value = {
            "beat": self._beats,
            "work": self._work,
            "doing": self._doing,
            "for": max(time.monotonic() - self._since, 0.0),
        }
        self._store.set(f"health/{self._rank}", json.dumps(value))

    def _note(self, message: str) -> None:
        self._store.compare_set(f"failure/{self._rank}", "", message[:500])

    def _failure(self, rank: int) -> str | None:
        key = f"failure/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _others_failed(self) -> bool:
        return any(self._failure(rank) for rank in range(self._size) if rank != self._rank)

    def _posts(self) -> dict[int, dict[str, Any]]:
        others = [rank for rank in range(self._size) if rank != self._rank and self._store.check([f"health/{rank}"])]
        return {rank: json.loads(self._store.get(f"health/{rank}")) for rank in others}

    def _culprit(self) -> str | None:
        """What happened to another rank. None if all of them are well and as far as this one."""
        before = self._posts()
        end = time.monotonic() + _PATIENCE
        while True:
            for rank in before:
                if message := self._failure(rank):
                    return f"rank {rank} failed: {message}"
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        now = self._posts()
        for rank, post in now.items():
            if post["beat"] == before[rank]["beat"]:
                return f"rank {rank} died or is cut off; the last that was heard of it: {post['doing']}"
        rank = min(now, key=lambda rank: now[rank]["work"], default=None)
        if rank is not None and now[rank]["work"] < self._work:
            return f"rank {rank} hangs: {now[rank]['for']:.0f} s at {now[rank]['doing']}"
        return None

    # -- the thread

    def _watch(self) -> None:
        main = threading.main_thread().ident
        while not self._end.wait(_INTERVAL):
            try:
                self._post()
                idle = time.monotonic() - self._since
                if idle > _GRACE and self._others_failed():  # a wait in NCCL does not end by itself
                    self._give_up("", waits=True)
                if idle < self._timeout_s:
                    continue
                frame = sys._current_frames()[main]
                waits = _waits_for_peers(frame) or any(post["work"] < self._work for post in self._posts().values())
                if not waits or idle > self._timeout_s + _GRACE:
                    own = f"no progress for {idle:.0f} s at {self._doing}, in {_place(frame)}"
                    self._give_up(f"{own}; distributed.timeout_s allows {self._timeout_s:g} s", waits)
            except dist.DistError:  # the agent and its store are gone, and this process soon
                return

    def _give_up(self, own: str, waits: bool) -> None:
        culprit = self._culprit() if waits else None
        if culprit is None:
            self._note(own)
        if not self._end.is_set():
            print(f"error on rank {self._rank}: {own if culprit is None else culprit}", file=sys.stderr, flush=True)
            os._exit(1)


def _place(frame: FrameType) -> str:
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"


def _waits_for_peers(frame: FrameType) -> bool:
    """Whether a thread whose innermost Python frame is this one waits in a collective."""
    parts = Path(frame.f_code.co_filename).parts
    return "distributed" in parts and bool({"torch", "torchrec"} & set(parts)) and "checkpoint" not in parts


def _lost_peer(error: BaseException | None) -> bool:
    """Whether the error, or what led to it, is a collective that failed for want of a peer."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
