"""Who is to blame when a collective fails, told by the signs of life that the ranks post. Both ranks are here."""

import re
import time

import pytest
import torch.distributed as dist

from recsys_norm.training import health
from recsys_norm.training.config import ConfigError
from recsys_norm.training.health import Health, RankError

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:61")


@pytest.fixture
def pair(monkeypatch):
    """Rank 0 and rank 1, not yet started."""
    monkeypatch.setattr(health, "_INTERVAL", 0.02)
    monkeypatch.setattr(health, "_PATIENCE", 0.4)
    store = dist.HashStore()
    return [Health(store, rank, 2, timeout_s=60) for rank in range(2)]


def test_an_error_of_another_rank_is_passed_on(pair):
    own = OSError(5, "the disk is gone")
    with pair[0], pair[1]:
        assert pair[1].cause(own) is own
        cause = pair[0].cause(LOST)
    assert isinstance(cause, RankError) and str(cause) == "rank 1 failed: OSError: [Errno 5] the disk is gone"


def test_our_own_errors_are_passed_on_without_their_class(pair):
    with pair[0], pair[1]:
        pair[1].cause(ConfigError("data: no such file"))
        assert str(pair[0].cause(LOST)) == "rank 1 failed: data: no such file"


def test_a_rank_without_signs_of_life_died(pair):
    with pair[0]:
        with pair[1]:
            pair[1].at("step 7")
            time.sleep(0.1)
        assert str(pair[0].cause(LOST)) == "rank 1 died or is cut off; the last that was heard of it: step 7"


def test_the_rank_that_is_behind_hangs(pair):
    with pair[0], pair[1]:
        for doing in ("step 7, waiting for its data", "step 7"):
            pair[0].at(doing)
        pair[1].at("step 7, waiting for its data")
        time.sleep(0.1)
        assert re.fullmatch(r"rank 1 hangs: \d+ s at step 7, waiting for its data", str(pair[0].cause(LOST)))


def test_without_a_culprit_the_error_stays(pair):
    with pair[0], pair[1]:
        assert pair[0].cause(LOST) is LOST
        assert str(pair[1].cause(LOST)).startswith("rank 0 failed: RuntimeError: [gloo")  # the first to see it


def test_one_process_watches_nothing():
    with Health(None, 0, 1, timeout_s=0.01) as alone:
        alone.at("step 7")
        assert alone.cause(LOST) is LOST


def test_asking_who_is_to_blame_is_no_hang(monkeypatch, pair):
    """It takes longer than a rank may make no progress."""
    ended = []
    monkeypatch.setattr(health.os, "_exit", ended.append)
    monkeypatch.setattr(health, "_GRACE", 0.0)
    store = dist.HashStore()
    asks, other = (Health(store, rank, 2, timeout_s=0.1) for rank in range(2))
    with asks, other, other.unlimited("reading"):
        asks.at("step 3")
        asks.cause(LOST)
        time.sleep(0.1)
    assert not ended
