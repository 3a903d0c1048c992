"""torch.compile around the dense part of the model, and how long that takes."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from recsys_norm.models.kunlun import filled_length

# Graphs of one forward function: layers differ in kind and mode (training or not), not in number of events.
MAX_GRAPHS = 64
FILL = 32  # a batch is filled up by half of 1/32 of its tokens on average


def compile_regions(dense: nn.Module, *, replay: bool) -> None:
    """Put each region of a DenseArch behind torch.compile, in place. A region is one graph for every number of events.

    The number of rows is compiled in: pass batches of one size. With `replay`, regions are recorded as CUDA graphs, those
    whose shapes depend on the number of tokens only if it is filled up (`DenseArch.token_multiple`): a step of kunlun_base
    is about 2,400 kernel launches, and the host would need longer for them than the device. What such a region returns is
    valid until the next step (`begin_step`); so are the gradients of its parameters.
    """
    from recsys_norm.ops.graph_passes import compile_options

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    # Blocks of two event types share their code and differ in width: dynamo would take the width for one that changes
    # from call to call, and inductor's kernels for unknown widths take twice the time.
    torch._dynamo.config.automatic_dynamic_shapes = False
    options = compile_options()
    for region, fixed in dense.regions():
        region.compile(fullgraph=True, options=options | {"triton.cudagraphs": fixed and replay})


def fill_tokens(dense: Any, model: Any, wanted: int | None) -> None:
    """Have a DenseArch fill its numbers of tokens up (`backend.token_multiple`). The number expected of an event type lies
    in the middle between two that are filled up to, so that most batches have the same."""
    expected = {name: round(model.batch_size * event.mean_len) for name, event in model.events.items()}
    tokens = max(expected.values(), default=0) / FILL
    multiple = wanted if wanted is not None else 1 << max(round(math.log2(tokens)), 6) if tokens >= 1 else 0
    dense.token_multiple = multiple or None
    dense.token_offsets = {name: (n + multiple // 2) % multiple for name, n in expected.items()} if multiple else {}


class Replays:
    """Which steps replay graphs alone. With numbers of tokens that have not occurred together before, a step runs without
    graphs, and the next one records them; both take seconds and belong to compiling."""

    RECORDING_STEPS = 2

    def __init__(self, dense: Any) -> None:
        self._fill = {name: (dense.token_multiple, dense.token_offsets.get(name, 0)) for name in dense.event_tokens}
        self._seen: Counter[tuple[int, ...]] = Counter()

    def count(self, tokens: Mapping[str, int]) -> bool:
        """Note a step with so many tokens of each event type; whether its graphs had all been recorded."""
        shape = tuple(filled_length(tokens[name], *fill) for name, fill in self._fill.items())
        self._seen[shape] += 1
        return self._seen[shape] > self.RECORDING_STEPS


def begin_step() -> None:
    """Tell replayed regions that a new step starts: what they returned in the last one may be overwritten."""
    torch.compiler.cudagraph_mark_step_begin()


@contextlib.contextmanager
def evaluated_eagerly(eager: bool) -> Iterator[None]:
    """Inside, and if `eager`, compiled regions run as ordinary PyTorch and nothing is compiled."""
    with torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext():
        yield


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
    def running(self) -> bool:
        return self._began is not None

    @property
    def seconds(self) -> float | None:
        return None if self._handler is None else self._seconds

    def _start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        if self._began is not None:
            self._seconds += time.perf_counter() - self._began
            self._began = None
