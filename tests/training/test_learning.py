"""The model learns from each user's own history, in runs of seconds on synthetic data."""

import numpy as np

from recsys_norm.data.generator import Generator

# A smaller model on shorter histories than `make train` has, which therefore needs fewer steps.
SETTINGS = [
    "model.batch_size=256",
    "model.dim=32",
    "model.tables.dim=16",
    "model.events.long.dim=32",
    "model.events.long.layers=1",
    "model.events.long.mean_len=6",
    "model.events.long.max_len=12",
    "model.events.short.dim=16",
    "model.events.short.mean_len=3",
    "model.events.short.max_len=6",
    "model.n_sum=8",
    "model.n_seeds=8",
    "model.n_summary=4",
    "model.fmb_tokens=4",
    "model.fmb_rank=8",
    "model.mlp_dim=64",
    "data.vocabulary=20",
    "data.train_rows=524288",
    "data.validation_rows=256",
    "data.test_rows=4096",
    "data.eval_batch_size=1024",
    "data.bayes_rows=16384",
    "trainer.max_steps=120",
    "trainer.checkpoint=false",
    "optimizer.dense.lr=0.003",
    "optimizer.sparse.lr=0.1",
    "optimizer.warmup_steps=50",
    "optimizer.decay=linear",
]


def exchange_histories(monkeypatch):
    """Every row gets the histories of another row of its batch, and keeps its own label."""
    original = Generator.rows

    def rows(self, stream, index, truncate=False):
        rows = original(self, stream, index, truncate)
        for name, (lengths, *columns) in rows.events.items():
            if not truncate:  # the truth, from which the Bayes AUC comes, stays
                histories = [np.split(column, np.cumsum(lengths)[:-1]) for column in columns]
                columns = [np.concatenate(parts[1:] + parts[:1]) for parts in histories]
                rows.events[name] = (np.roll(lengths, -1), *columns)
        return rows

    monkeypatch.setattr(Generator, "rows", rows)


def test_the_way_to_the_bayes_auc_needs_the_users_own_history(train, monkeypatch):
    def way(name):
        result, _ = train(*SETTINGS, name=name)
        return (result["auc"] - 0.5) / (result["bayes_auc"] - 0.5)

    assert way("own") > 0.85
    exchange_histories(monkeypatch)
    assert 0.2 < way("of another user") < 0.7  # what does not need a history is learned
