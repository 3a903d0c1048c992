"""Two NCCL ranks, each on a GPU of its own, against one: the same code as the gloo ranks of tests/training."""

import json

import pytest
import torch
from rank_pool import Ranks

from recsys_norm.training.main import main

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

# 256 rows a step over all ranks; 1 row in the last step of an epoch, so that rank 0 has none.
RUN = ["model=kunlun_tiny", "model.tables.rows=1000", "data=synthetic", "data.vocabulary=200", "data.bayes_rows=2048"]
RUN += ["data.train_rows=2049", "data.validation_rows=257", "data.test_rows=257", "data.num_workers=2"]
RUN += ["trainer.precision=fp32", "trainer.max_epochs=3", "trainer.max_steps=20", "trainer.eval_every_epochs=null"]
RUN += ["trainer.eval_every_steps=10", "trainer.profile_steps=0", "optimizer.warmup_steps=4", "backend=unfused"]
RUN += ["logger=quiet", "logger.tensorboard=false", "logger.every_steps=5"]
TOLERANCE = 1e-4  # fp32, but the tables' gradients are summed in an order that changes


def records(run_dir, split):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def losses(run_dir):
    return [loss for record in records(run_dir, "train") for loss in record["step_loss"]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    workers = Ranks(tmp_path_factory.mktemp("ranks"))
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def two(ranks, tmp_path_factory):
    def run(*overrides):
        run_dir = tmp_path_factory.mktemp("two") / "run"
        settings = [*RUN, "model.batch_size=128", "distributed=torchrec", f"hydra.run.dir={run_dir}"]
        answers = ranks("main", *settings, *overrides)
        assert [answer["code"] for answer in answers] == [0, 0], "\n".join(answer["err"][-2000:] for answer in answers)
        return run_dir

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory, ranks):
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    main(["train.py", *RUN, f"hydra.run.dir={run_dir}"])
    return run_dir


@pytest.mark.parametrize(
    "overrides",
    [
        ["distributed.sharding=[table_wise]"],
        ["distributed.sharding=[row_wise]"],
        ["distributed.sharding=[data_parallel]", "+distributed.tables.item=[row_wise]"],
        ["distributed.sharding=[data_parallel]"],  # which has nothing to pipeline
        ["distributed.dense=fsdp2"],
    ],
    ids=["table_wise", "row_wise", "mixed", "data_parallel", "fsdp2"],
)
def test_two_gpus_have_the_losses_of_one(alone, two, overrides):
    run_dir = two(*overrides)
    assert len(losses(run_dir)) == 20 and losses(run_dir) == pytest.approx(losses(alone), abs=TOLERANCE)
    for split in ("validation", "test"):
        ours, theirs = records(run_dir, split), records(alone, split)
        assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], abs=TOLERANCE)


def test_a_checkpoint_of_one_gpu_continues_on_two(alone, two, tmp_path):
    first = tmp_path / "first"
    main(["train.py", *RUN, "trainer.max_steps=10", "trainer.test=false", f"hydra.run.dir={first}"])
    run_dir = two(f"trainer.resume={first}", "distributed.sharding=[row_wise]")
    assert losses(run_dir) == pytest.approx(losses(alone), abs=TOLERANCE)


@pytest.mark.parametrize("backend", ["fused", "compiled"])
def test_low_precision_backends_train_on_two_gpus(two, backend):
    """bf16 with fp32 masters, gradients exchanged in bf16, and CUDA graphs where `compiled` records them."""
    run_dir = two("trainer.precision=bf16", f"backend={backend}", "backend.compile_eval=false")
    assert all(0 < loss < 2 for loss in losses(run_dir)) and len(losses(run_dir)) == 20
