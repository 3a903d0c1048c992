"""Steps that record CUDA graphs are not timed."""

from types import SimpleNamespace

from recsys_norm.training.compiling import Replays, fill_tokens
from recsys_norm.training.trainer import Trainer


def dense(multiple=None, **offsets):
    return SimpleNamespace(
        event_tokens=dict.fromkeys(("long", "short")), token_multiple=multiple, token_offsets=offsets
    )


def test_a_number_of_tokens_counts_from_its_third_step_on():
    replays = Replays(dense())
    tokens = [(5, 7), (5, 7), (5, 8), (5, 7), (5, 8), (5, 8), (5, 7)]
    found = [replays.count({"short": short, "long": long}) for long, short in tokens]
    assert found == [False, False, False, True, False, True, True]


def test_numbers_that_are_filled_up_to_the_same_are_the_same():
    replays = Replays(dense(16, long=3))
    assert [replays.count({"long": n, "short": 16}) for n in (4, 19, 10, 20, 19)] == [False, False, True, False, True]
    assert [replays.count({"long": n, "short": m}) for n, m in ((10, 1), (19, 2), (19, 0))] == [True, True, False]


def test_it_fills_as_the_model_does():
    module = dense()
    event = SimpleNamespace(mean_len=40.0)
    fill_tokens(module, SimpleNamespace(batch_size=128, events={"long": event, "short": event}), None)
    replays, multiple = Replays(module), module.token_multiple
    middle = 128 * 40
    found = [replays.count({"long": middle + n, "short": middle}) for n in (0, 1, -multiple // 2 + 1, multiple)]
    assert found == [False, False, True, False]


def test_steps_that_record_are_not_timed(train, monkeypatch):
    fit = Trainer.fit

    class EveryThird:
        seen = 0

        def count(self, events):
            assert set(events) == set(names)
            self.seen += 1
            return self.seen % 3 == 0

    names = []

    def fitted(self):
        names[:] = self.dense.event_tokens
        self.replays = EveryThird()
        fit(self)
        assert self.replays.seen == 12

    monkeypatch.setattr(Trainer, "fit", fitted)
    result, _ = train("trainer.timing_warmup=0")
    assert result["steps"] == 12 and result["measured_steps"] == 4
