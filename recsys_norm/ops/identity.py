"""Replace every norm by the identity, to measure what the norms of a step cost (`norm_cost`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_active = False


@contextlib.contextmanager
def norms_as_identity() -> Iterator[None]:
    """Inside, every op of `recsys_norm.ops` skips its normalization and affine and keeps everything else.

    For measurements only: the results are those of another model. Code compiled outside recompiles once inside.
    """
    global _active
    before, _active = _active, True
    try:
        yield
    finally:
        _active = before


def norms_are_identity() -> bool:
    return _active
