"""Rows of the synthetic data set as a pure function of (seed, stream, row index).

Every number is a hash of its coordinates (counter-based, as in Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011, here with the splitmix64 finaliser), so that any row can be made alone, in any order, on any rank.

The true logit of a row is

    bias + static_weight * static + sum over event types e of weight_e * history_e
    static    = (dense @ a + sum of the effects of its pooled ids / sqrt(tables) + effect of the candidate) / sqrt(3)
    history_e = sum_r decay_e^r * sign(action_r) * [class(item_r) = class(candidate)] / normaliser_e

r = 0 is the latest event of the sequence, r = 1 the one before, and so on: the order of a history decides how much each
event counts. class() is a fixed random map of items, sign(action) is + for even and - for odd actions. Items, actions
and candidates are independent of everything else, so the static part knows nothing about the history part.
static has variance near 1, history_e has variance 1 for a history that is long.

Shape legend: B rows, T events of one type over all rows, R events of a row that count.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from recsys_norm.data.config import LengthConfig, SyntheticConfig, SyntheticEventConfig

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NEGLIGIBLE = 1e-3  # an event that weighs less than this share of the latest one does not count at all
GAP_SECONDS = 3600.0  # median time between two events of a user of median activity


@dataclass
class Rows:
    """B generated rows. `events` maps a name to (lengths [B], item [T], action [T], age [T])."""

    dense: np.ndarray  # [B, n_dense] float32
    sparse: list[tuple[np.ndarray, np.ndarray]]  # per pooled table (ids, lengths [B])
    candidate: np.ndarray  # [B] int64
    events: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]
    user: np.ndarray  # [B] int64
    logit: np.ndarray  # [B] float64
    label: np.ndarray  # [B] float32


class Generator:
    """Makes rows for a config. `stream` names a split (and, for training, a pass and a seed)."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.ids = _zipf_ids(config.vocabulary or config.rows, config.popularity)
        self.stride = config.rows // (config.vocabulary or config.rows)
        self.normal = np.array([NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)], dtype=np.float32)
        self.gaps = GAP_SECONDS * np.exp(0.5 * self.normal)
        world = _mix(_key(config.seed, 0) + GOLDEN * np.arange(config.tables + 3, dtype=np.uint64))
        self.share = np.bincount(self.ids) / len(self.ids)
        effects = [self._effects(key) for key in world[: config.tables + 1]]
        self.sparse_effects, self.candidate_effect = effects[:-1], effects[-1]
        direction = self._normal(_counter(world[-2], config.n_dense)).astype(np.float64)
        self.direction = direction / max(np.linalg.norm(direction), 1e-12)
        bits = _counter(world[-1], config.vocabulary or config.rows)
        self.item_class = (bits % np.uint64(config.classes)).astype(np.uint8)

    def rows(self, stream: int, index: np.ndarray, truncate: bool = False) -> Rows:
        """Rows `index` [B] of a stream. `truncate` keeps only the events that count: same labels and logits, faster."""
        config = self.config
        row_B = _mix(_key(config.seed, 1 + stream) + GOLDEN * index.astype(np.uint64))
        part = [_mix(row_B ^ key) for key in _counts(6 + len(config.events))[1:]]
        dense = self._normal(_mix(part[0][:, None] + GOLDEN * np.arange(config.n_dense, dtype=np.uint64)))
        sparse, sparse_effect = self._pooled(part[1])
        candidate = self._draw(part[2])
        user = (part[3] % np.uint64(config.users)).astype(np.int64)
        static = ((dense * self.direction).sum(1) + sparse_effect + self.candidate_effect[candidate]) / np.sqrt(3.0)
        logit = config.bias + config.static_weight * static
        events = {}
        for key, (name, event) in zip(part[5:], config.events.items(), strict=True):
            lengths = draw_lengths(key, index, event, config.lengths, config.batch_size)
            if truncate:
                lengths = np.minimum(lengths, reach(event))
            item, action, age = self._events(key, lengths, user)
            logit += event.weight * self._history(event, lengths, item, action, candidate)
            events[name] = (lengths, item.astype(np.int64) * self.stride, action.astype(np.int64), age)
        label = (_uniform(part[4]) < 1.0 / (1.0 + np.exp(-logit))).astype(np.float32)
        return Rows(dense, sparse, candidate.astype(np.int64) * self.stride, events, user, logit, label)

    def _events(self, key_B: np.ndarray, lengths: np.ndarray, user: np.ndarray) -> tuple[np.ndarray, ...]:
        """Items (ranks of popularity), actions and ages of all events, packed, oldest first."""
        ends = np.cumsum(lengths)
        # Keyed by the distance from the end of the row, so that a truncated history has the same latest events.
        bits_T = _mix(np.repeat(key_B + GOLDEN * ends.astype(np.uint64), lengths) - _counts(int(lengths.sum())))
        item = self._draw(bits_T)
        action = (bits_T >> np.uint64(24) & np.uint64(0xFFFF)) * np.uint64(self.config.actions) >> np.uint64(16)
        elapsed = np.concatenate([[0.0], np.cumsum(self.gaps[bits_T >> np.uint64(52)], dtype=np.float64)])
        pace = np.exp(0.3 * self.normal[_mix(user.astype(np.uint64)) >> np.uint64(52)])
        age = (np.repeat(elapsed[ends], lengths) - elapsed[:-1]) * np.repeat(pace, lengths)
        return item, action, age.astype(np.float32)

    def _history(
        self,
        event: SyntheticEventConfig,
        lengths: np.ndarray,
        item: np.ndarray,
        action: np.ndarray,
        candidate: np.ndarray,
    ) -> np.ndarray:
        """history_e of the module docstring, [B]."""
        back_R = np.arange(reach(event))
        valid = back_R < lengths[:, None]
        at = np.where(valid, np.cumsum(lengths)[:, None] - 1 - back_R, 0)
        if len(item) == 0:
            return np.zeros(len(lengths))
        match = self.item_class[item[at]] == self.item_class[candidate][:, None]
        sign = 1.0 - 2.0 * (action[at] % np.uint64(2))
        weights = event.decay**back_R
        normaliser = np.sqrt((weights**2).sum() / self.config.classes)
        return (sign * match * valid * weights).sum(1) / normaliser

    def _pooled(self, key_B: np.ndarray) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
        columns, effect = [], np.zeros(len(key_B))
        for table, offset in enumerate(_counts(self.config.tables)):
            key = _mix(key_B + offset)
            lengths = np.ones(len(key), dtype=np.int64)
            if table == self.config.tables - 1:
                lengths = (key >> np.uint64(32)).astype(np.int64) % (self.config.multi_hot + 1)
            row = np.repeat(np.arange(len(key)), lengths)
            first = GOLDEN * (np.cumsum(lengths) - lengths).astype(np.uint64)
            rank = self._draw(_mix((key - first)[row] + _counts(len(row))))
            effect += np.bincount(row, self.sparse_effects[table][rank], len(key))
            columns.append((rank.astype(np.int64) * self.stride, lengths))
        return columns, effect / np.sqrt(max(self.config.tables, 1))

    def _draw(self, bits: np.ndarray) -> np.ndarray:
        """Ids (ranks of popularity) from the low bits."""
        return self.ids[bits & np.uint64(len(self.ids) - 1)]

    def _normal(self, bits: np.ndarray) -> np.ndarray:
        return self.normal[bits >> np.uint64(52)]

    def _effects(self, key: np.uint64) -> np.ndarray:
        """An effect per id, with mean 0 and variance 1 over draws."""
        effect = self._normal(_counter(key, len(self.share))).astype(np.float64)
        effect -= effect @ self.share
        return (effect / max(np.sqrt(effect**2 @ self.share), 1e-12)).astype(np.float32)


def reach(event: SyntheticEventConfig) -> int:
    """R: how many of the latest events count."""
    if event.decay == 0.0:
        return 1
    if event.decay == 1.0:
        return event.max_len
    return min(event.max_len, 1 + int(np.log(NEGLIGIBLE) / np.log(event.decay)))


def draw_lengths(
    key_B: np.ndarray, index: np.ndarray, event: SyntheticEventConfig, lengths: LengthConfig, batch_size: int
) -> np.ndarray:
    """Number of events per row, [B] int64."""
    u = _uniform(_mix(key_B ^ np.uint64(0x5851F42D4C957F2D)))
    if lengths.distribution == "fixed":
        drawn = np.full(len(u), event.mean_len, dtype=np.int64)
    elif lengths.distribution == "uniform":
        drawn = 1 + (u * (2 * event.mean_len - 1)).astype(np.int64)
    else:
        weights = np.arange(1, event.max_len + 1, dtype=np.float64) ** -lengths.exponent
        drawn = 1 + np.searchsorted(np.cumsum(weights) / weights.sum(), u, side="right")
        drawn = np.minimum(drawn, event.max_len)
    if lengths.empty:
        drawn[_uniform(_mix(key_B ^ np.uint64(0x14057B7EF767814F))) < lengths.empty] = 0
    if lengths.long_user:
        drawn[index % batch_size == 0] = event.max_len
    return drawn


def _zipf_ids(vocabulary: int, exponent: float) -> np.ndarray:
    """Quantile table of a Zipf distribution over 0 .. vocabulary - 1; its size is a power of two."""
    size = max(1 << 16, 1 << (vocabulary - 1).bit_length())
    cumulative = np.cumsum(np.arange(1, vocabulary + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(cumulative / cumulative[-1], (np.arange(size) + 0.5) / size).astype(np.int32)


def _mix(bits: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    bits = np.array(bits, dtype=np.uint64)
    shifted = np.empty_like(bits)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= np.right_shift(bits, np.uint64(shift), out=shifted)
        bits *= np.uint64(factor)
    bits ^= np.right_shift(bits, np.uint64(31), out=shifted)
    return bits


def _key(seed: int, stream: int) -> np.ndarray:
    return _mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) + np.array([stream % 2**64], dtype=np.uint64))


def _counts(n: int) -> np.ndarray:
    return GOLDEN * np.arange(n, dtype=np.uint64)


def _counter(key: np.uint64, n: int) -> np.ndarray:
    return _mix(key + _counts(n))


def _uniform(bits: np.ndarray) -> np.ndarray:
    """Uniform on [0, 1), from the high bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
