"""torch.compile around the dense part of the model, and how long that takes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

# Graphs of one forward function: layers differ in kind and mode (training or not), not in number of events.
MAX_GRAPHS = 64


def compile_regions(dense: nn.Module) -> None:
    """Put each region of a DenseArch behind torch.compile, in place. A region is one graph for every number of events.

    The number of rows is compiled in: pass batches of one size. Layers of the same kind and sizes share a graph: on the
    16 cores of an H200 machine kunlun_base had made its first 16 steps after 116 s this way; as one graph it had made
    none after 150 s.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    for region in dense.regions():
        region.compile(fullgraph=True)


class CompileClock:
    """Seconds spent in torch.compile, in whatever thread of the run asks for it; None where torch does not tell."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: float | None = None
        self._handler = None

    def __enter__(self) -> CompileClock:
        try:
            from torch._dynamo.callback import callback_handler
        except ImportError:
            return self
        self._handler = callback_handler
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._stop)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._handler is not None:
            self._handler.remove_start_callback(self._start)
            self._handler.remove_end_callback(self._stop)

    @property
    def seconds(self) -> float | None:
        return None if self._handler is None else self._seconds

    def _start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        if self._began is not None:
            self._seconds += time.perf_counter() - self._began
            self._began = None
