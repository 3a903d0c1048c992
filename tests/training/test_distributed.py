"""Two gloo ranks against one: the same losses, checkpoints that move between them, and errors that name their rank.

All checks share two worker processes; each job is a whole run of the training program.
"""

import json
import os
import signal

import pytest
import torch
from rank_pool import Ranks

from recsys_norm.training.main import main

# 16 rows a step over all ranks, but 1 row in the last of an epoch's 9: rank 0 has none then.
SAME = ["data.train_rows=129", "data.test_rows=33", "data.validation_rows=17", "trainer.max_epochs=20"]
SAME += ["trainer.eval_every_epochs=null", "trainer.eval_every_steps=10", "logger.every_steps=5"]
SHORT = [*SAME, "trainer.max_steps=12", "trainer.test=false"]

# fp32, so two runs differ in the order of summation alone; the losses are around 0.7.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    workers = Ranks(tmp_path_factory.mktemp("ranks"))
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def settings(tiny):
    """settings(run directory): the overrides of a run on two ranks with the global batch of one."""
    return lambda run_dir: [*tiny, "model.batch_size=8", "distributed=torchrec", f"hydra.run.dir={run_dir}"]


@pytest.fixture
def two(ranks, settings, tmp_path):
    """two(*overrides, name="two"): the run directory of a run on two ranks that succeeded."""

    def run(*overrides, name="two"):
        answers = ranks("main", *settings(tmp_path / name), *overrides)
        assert [answer["code"] for answer in answers] == [0, 0], "\n".join(answer["err"][-2000:] for answer in answers)
        return tmp_path / name

    return run


@pytest.fixture
def losses(records):
    return lambda run_dir: [loss for record in records(run_dir, "train") for loss in record["step_loss"]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tiny, ranks):
    """The run directory of 50 steps on one rank, in this process."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    main(["train.py", *tiny, *SAME, "trainer.max_steps=50", f"hydra.run.dir={run_dir}"])
    return run_dir


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_fifty_steps_have_the_losses_of_one_rank(alone, two, losses, records, sharding):
    run_dir = two(*SAME, "trainer.max_steps=50", f"distributed.sharding=[{sharding}]")
    ours, theirs = losses(run_dir), losses(alone)
    assert len(ours) == 50 and ours == pytest.approx(theirs, abs=TOLERANCE)
    for split in ("validation", "test"):
        mine, reference = records(run_dir, split), records(alone, split)
        for name in ("loss", "auc", "gauc", "calibration"):
            assert [line[name] for line in mine] == pytest.approx([line[name] for line in reference], abs=TOLERANCE)
    ne = [[line["ne"] for line in records(folder, "train")] for folder in (run_dir, alone)]  # by torchrec.metrics
    assert ne[0] == pytest.approx(ne[1], rel=1e-5)  # huge where a batch has one class only
    plan = json.loads((run_dir / "plan.json").read_text())
    assert {table["sharding"] for table in plan.values()} == {sharding} and len(plan) == 4
    for table in plan.values():
        rows, columns = table["size"]
        assert sum(table["bytes_per_rank"]) == 4 * rows * columns
        assert (min(table["bytes_per_rank"]) > 0) == (sharding == "row_wise")


def tables(**sharding):
    return [f"+distributed.tables.{table}=[{kind}]" for table, kind in sharding.items()]


MIXED = tables(sparse_0="data_parallel", sparse_1="row_wise", item="row_wise", action="table_wise")


@pytest.mark.parametrize(
    "overrides",
    [
        MIXED,
        ["distributed.dense=fsdp2"],
        ["distributed.sharding=[data_parallel]", *tables(item="table_wise", action="table_wise")],
        ["distributed.pipeline=false"],
    ],
    ids=["mixed", "fsdp2", "replicated", "unpipelined"],
)
def test_options_change_nothing_but_where_things_are(alone, two, losses, overrides):
    run_dir = two(*SHORT, *overrides)
    assert losses(run_dir) == pytest.approx(losses(alone)[:12], abs=TOLERANCE)


def test_embeddings_travel_in_half_precision(alone, two, losses):
    from recsys_norm.training.sharding import _sharders

    run_dir = two(*SHORT, "distributed.exchange=fp16")
    assert losses(run_dir) == pytest.approx(losses(alone)[:12], abs=1e-3)
    registries = [sharder.qcomm_codecs_registry for sharder in _sharders(torch.device("cpu"), "fp16")]
    assert all({codecs.forward.quantized_dtype for codecs in r.values()} == {torch.float16} for r in registries)
    assert [sharder.qcomm_codecs_registry for sharder in _sharders(torch.device("cpu"), "fp32")] == [None, None]


def test_column_wise_tables_train(two, losses):
    """Row-wise Adagrad takes its mean over the columns of a shard, so the losses are others than those of one rank."""
    run_dir = two(*SHORT, "distributed.sharding=[column_wise]")
    plan = json.loads((run_dir / "plan.json").read_text())
    assert all(table["bytes_per_rank"][0] == table["bytes_per_rank"][1] > 0 for table in plan.values())
    assert all(0 < loss < 3 for loss in losses(run_dir))


def test_a_checkpoint_moves_between_ranks_shardings_and_backends(alone, train, two, losses, records):
    """A22: 10 steps on one rank, 10 on two, 10 on one again are the first 30 steps of a run that never moved."""
    part = [*SAME, "trainer.test=false"]
    _, first = train(*part, "trainer.max_steps=10", "backend=unfused", name="first")
    sharding = ["distributed.sharding=[row_wise]", *tables(sparse_0="data_parallel", item="table_wise")]
    sharding.append("distributed.dense=fsdp2")
    second = two(*part, "trainer.max_steps=20", "backend=fused", f"trainer.resume={first}", *sharding, name="second")
    back = [f"trainer.resume={second}", "distributed=single", "distributed.sharding=[]"]
    _, third = train(*part, "trainer.max_steps=30", "backend=unfused", *back, name="third")
    assert len(losses(third)) == 30 and losses(third) == pytest.approx(losses(alone)[:30], abs=TOLERANCE)
    moved, stayed = records(third, "validation"), records(alone, "validation")[:3]
    assert [line["loss"] for line in moved] == pytest.approx([line["loss"] for line in stayed], abs=TOLERANCE)


def test_column_wise_tables_share_their_row_sums_with_others(alone, train, two, losses, tiny):
    """A column-wise table has a sum for each row and rank: each takes the one sum of a whole row; back, their mean."""
    part = [*SAME, "trainer.test=false"]
    _, first = train(*part, "trainer.max_steps=10", name="first")
    column = ["distributed.sharding=[column_wise]", f"trainer.resume={first}"]
    second = two(*part, "trainer.max_steps=11", *column, name="second")
    assert losses(second)[10] == pytest.approx(losses(alone)[10], abs=TOLERANCE)  # the tables themselves are the same
    back = [f"trainer.resume={second}", "distributed=single", "distributed.sharding=[]"]
    _, third = train(*part, "trainer.max_steps=12", *back, name="third")
    assert losses(third)[11] == pytest.approx(losses(alone)[11], abs=1e-3)


@pytest.mark.parametrize(
    "spoiled, named", [("loss", "the loss is nan"), ("gradient", "the norm of the gradients is nan")]
)
def test_a_nan_is_reported_with_its_rank(ranks, settings, tmp_path, spoiled, named):
    answers = ranks("nan", spoiled, 1, 11, *settings(tmp_path / "run"), *SHORT)
    assert [answer["code"] for answer in answers] == [1, 1]
    assert f"{named} at step 11 (epoch 1, batch 2) on rank 1;" in answers[0]["err"]
    assert answers[0]["err"].count("\n") == 1 and "is of step 10" in answers[0]["err"]


def test_a_planner_failure_is_reported_by_every_rank(ranks, settings, tmp_path):
    for answer in ranks("main", *settings(tmp_path / "run"), "distributed.memory_gb=1e-6"):
        assert answer["code"] == 1 and "found no place for the embedding tables on 2 process(es)" in answer["err"]


def test_tables_that_a_cpu_cannot_replicate_are_named(ranks, settings, tmp_path):
    for answer in ranks("main", *settings(tmp_path / "run"), "distributed.sharding=[data_parallel]"):
        assert answer["code"] == 1 and "table 'item'" in answer["err"] and "tables.item=[table_wise]" in answer["err"]


def test_a_hanging_and_a_killed_rank_end_the_run_which_resumes(alone, ranks, settings, tmp_path, losses):
    """torchrun restarts it twice; in the end it has the losses of a run that nothing stopped."""
    run_dir = tmp_path / "run"
    resumed = [*SAME, "trainer.max_steps=30", "trainer.test=false", "trainer.checkpoint_every_steps=5"]
    ranks.start("hangs", 1, 12, 20, *settings(run_dir), *resumed, restart=True)
    ranks.wait((run_dir / "checkpoints" / "step-00000015").exists)
    os.kill(int(ranks.said("1.pid")), signal.SIGKILL)
    answers = ranks.answers()
    assert [answer["code"] for answer in answers] == [0, 0] and "resuming from step " in answers[0]["out"]
    assert losses(run_dir) == pytest.approx(losses(alone)[:30], abs=TOLERANCE)
    hung, killed = ranks.errors(restart=0), ranks.errors(restart=1)
    assert hung[1].startswith("error on rank 1: no progress for 20 s at step 12, in tests/rank_worker.py")
    assert "rank 1 failed: no progress for 20 s at step 12" in hung[0] and hung[0].count("\n") == 1
    assert killed[0].startswith("error: rank 1 died") and killed[0].count("\n") == 1
