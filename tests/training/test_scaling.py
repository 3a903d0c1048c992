"""benchmarks/scaling.py on two gloo ranks: the gate, the record of a case, and a trainer of one rank beside that of both."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_case_on_two_ranks(tiny, tmp_path):
    record = tmp_path / "scaling.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    size = ["--models", "kunlun_tiny", "--backends", "fused", "--table-gb", "0.001", "--strong"]
    short = ["--batches", "1", "--rounds", "2", "--steps", "1"]
    settings = [s for s in tiny if s.startswith(("model.", "optimizer.", "trainer.threads"))]
    script = [str(ROOT / "benchmarks" / "scaling.py"), "--json", str(record), *size, *short, "--set", *settings]
    done = subprocess.run([*launcher, *script], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (case,) = json.loads(record.read_text())
    assert case["world_size"] == 2 and set(case["gate_loss_difference"]) == {"table_wise", "row_wise"}
    assert set(case["step_ms"]) == {"alone", "together", "strong"} and min(case["step_ms"].values()) > 0
    alone, together = ([len(blocks) for blocks in case["blocks_ms"][name]] for name in ("alone", "together"))
    assert alone == [2, 0] and together == [2, 2]
    assert case["last_loss"][0]["together"] == case["last_loss"][1]["together"] != case["last_loss"][0]["alone"]
    held = [memory["tables_bytes"] for memory in case["memory_per_rank"]]
    assert sum(held) == sum(4 * t["size"][0] * t["size"][1] for t in case["plan"].values()) and min(held) > 0
