"""How a module asks its op to be computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recsys_norm.ops.inputs import check_policy


@dataclass(frozen=True)
class Policy:
    """backend, technique and on_unsupported of `recsys_norm.ops`, checked once."""

    backend: str = "fused"
    technique: str | None = None
    on_unsupported: str = "raise"

    def __post_init__(self):
        check_policy("recsys_norm.nn", self.backend, self.technique, self.on_unsupported)

    def arguments(self) -> dict[str, Any]:
        return dict(backend=self.backend, technique=self.technique, on_unsupported=self.on_unsupported)
