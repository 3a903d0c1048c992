"""What a comparison makes of finished runs."""

import json
import xml.etree.ElementTree as xml

import numpy as np
import pytest

from recsys_norm.bench import __main__ as command
from recsys_norm.bench import compare, compare_plot, compare_report, compare_runs

ENV = {"gpu": None, "torch": "2.13.0", "triton": None, "torchrec": "1.8.0", "driver": None}


def summary(backend="unfused", step=100.0, *, row_order=0, weights="w", batches="b", **fields):
    """A run of 256 rows a step that takes `step` ms, a tenth of it for norms."""
    phases = {"data": 1.0, "forward": 0.4 * step, "backward": 0.5 * step, "optimizer": 2.0}
    return {
        "backend": backend, "compile": backend == "compiled", "attention": "fused", "model": "kunlun_tiny",
        "data": "synthetic", "device": "cpu", "world_size": 1, "dtype": "float32", "batch": 256, "seed": 0, "steps": 4,
        "measured_steps": 3, "examples_per_s": 256e3 / step, "tokens_per_s": 8e6 / step,
        "step_ms": {"p20": 0.9 * step, "p50": step, "p80": 1.2 * step}, "phase_ms": phases, "norm_share": None,
        "norm_cost": 0.1, "mfu": None, "peak_mem_bytes": None, "activation_mem_bytes": None, "loss": 0.6, "ne": 0.9,
        "auc": 0.7, "gauc": 0.7, "split": "test", "bayes_auc": 0.9, "techniques": {"norm": {backend: 12}},
        "fallbacks": {}, "compile_s": 0.0, "tune_s": None, "env": ENV,
        "start": {"weights": weights, "batches": batches, "first_batches": 4, "row_order": row_order},
    } | fields  # fmt: skip


def run(backend="unfused", step=100.0, losses=(0.7, 0.6, 0.5, 0.4), config=None, **fields):
    return compare_runs.Run(f"runs/{backend}", summary(backend, step, **fields), None, config or {}, list(losses))


def shifted(by):
    return [loss + by for loss in (0.7, 0.6, 0.5, 0.4)]


CONTROL = run(losses=shifted(1e-3), row_order=1)


def only_group(*runs):
    (group,) = compare.compare(runs)["groups"]
    return group, {entry["path"]: entry for entry in group["paths"]}


def test_speed_is_ranked_and_compared_with_unfused_and_compiled():
    group, paths = only_group(run("fused", 50), run(), run("compiled", 80), CONTROL)
    assert [entry["path"] for entry in group["paths"]] == ["unfused", "compiled", "fused"]
    assert [entry["rank"] for entry in group["paths"]] == [3, 2, 1]
    assert paths["fused"]["gain"] == {"norms": pytest.approx(2), "compiled": pytest.approx(1.6), "attention": None}
    assert paths["fused"]["norm_ms"] == pytest.approx(5)
    assert compare_plot.headline(group) == "fused trains 2.00x as fast as unfused and 1.60x as fast as compiled"


def test_gains_of_attention_and_of_norms_are_apart():
    eager = {"attention": "eager"}
    runs = [run("unfused", 400, **eager), run("fused", 200, **eager), run("unfused", 100), run("fused", 80)]
    _, paths = only_group(*runs)
    assert list(paths) == ["unfused", "fused", "unfused, eager attention", "fused, eager attention"]
    assert paths["fused"]["gain"] == {"norms": pytest.approx(1.25), "compiled": None, "attention": pytest.approx(2.5)}
    assert paths["unfused"]["gain"]["attention"] == pytest.approx(4)
    assert paths["fused, eager attention"]["gain"] == {"norms": pytest.approx(2), "compiled": None, "attention": None}


def test_repeated_runs_count_by_their_median_and_the_first_compilation():
    times = [(50, 30.0), (90, 2.0), (60, 2.5)]
    _, paths = only_group(run(), *[run("compiled", step, compile_s=s) for step, s in times])
    compiled = paths["compiled"]
    assert compiled["runs"] == 3 and compiled["step_ms_of_runs"] == [50, 90, 60]
    assert compiled["step_ms"]["p50"] == 60 and compiled["examples_per_s"] == pytest.approx(256e3 / 60)
    assert compiled["compile_s"] == 30
    assert "50.0 90.0 60.0" in compare_report.text(
        {"groups": [only_group(run(), *[run("compiled", s) for s, _ in times])[0]]}
    )


# The control differs by 1e-3 on average, so 2e-3 is allowed.
@pytest.mark.parametrize("by, status", [(1.9e-3, "agrees"), (2.1e-3, "diverged"), (float("inf"), "diverged")])
def test_a_path_that_diverges_is_marked_and_not_ranked(by, status):
    group, paths = only_group(run(), run("fused", 50, losses=shifted(by)), run("compiled", 80), CONTROL)
    fused = paths["fused"]
    assert group["control"]["mean_abs_difference"] == pytest.approx(1e-3)
    assert fused["status"] == status and (fused["rank"] is None) == (status == "diverged")
    assert paths["compiled"]["rank"] == (1 if status == "diverged" else 2)
    text = compare_report.text({"groups": [group]})
    assert ("DIVERGES" in text) == ("fused diverges from unfused" in text) == (status == "diverged")
    assert (fused["gain"]["norms"] is None) == (status == "diverged")


def test_curves_of_different_lengths_do_not_agree():
    _, paths = only_group(run(), run("fused", losses=shifted(0)[:3]), CONTROL)
    assert paths["fused"]["status"] == "diverged"


def test_the_rule_looks_at_300_steps():
    long = [0.5] * 400
    late = [0.5] * 300 + [0.9] * 100
    _, paths = only_group(run(losses=long), run("fused", losses=late), run(losses=[0.501] * 400, row_order=1))
    assert paths["fused"]["status"] == "agrees" and paths["fused"]["curve"]["steps"] == 300


def test_without_a_control_curves_are_not_judged():
    group, paths = only_group(run(), run("fused", 50, losses=shifted(1.0)))
    assert paths["fused"]["status"] == "not judged" and paths["fused"]["rank"] == 1
    assert "not judged" in compare_report.text({"groups": [group]}) and "no control run" in group["notes"][-1]


@pytest.mark.parametrize(
    "what, told", [("weights", "started from other initial weights"), ("batches", "saw other batches")]
)
def test_an_unfair_start_is_found(what, told):
    group, paths = only_group(run(), run("fused", 50, **{what: "other"}), CONTROL)
    assert paths["fused"]["status"] == "not comparable" and paths["fused"]["rank"] is None
    assert any(f"fused {told} than unfused" in note for note in group["notes"])
    assert paths["unfused"]["start"] == {"weights": True, "batches": True}


def test_fallbacks_are_said_plainly():
    why = "backend 'fused' cannot run: its kernels need a CUDA device; separate (torch) serves it"
    fallbacks = {f"norm: {why}": 7, f"norm_linear: {why}": 5}
    group, _ = only_group(run(), run("fused", 50, fallbacks=fallbacks))
    note = "fused is a fallback here, 12 calls (100%): its kernels need a CUDA device; separate (torch) serves it"
    assert f"{note} (norm, norm_linear)" in group["notes"]
    assert compare_plot.headline(group).startswith("Fastest: fused")  # which claims no gain from its kernels
    group, _ = only_group(
        run(), run("fused", 50, fallbacks=fallbacks, techniques={"norm": {"lazy": 36, "separate": 12}})
    )
    assert any(note.startswith("fused fell back in 12 calls (25%)") for note in group["notes"])
    assert compare_plot.headline(group) == "fused trains 2.00x as fast as unfused"
    slower, _ = only_group(run(), run("compiled", 101))
    assert compare_plot.headline(slower) == "Fastest: unfused, 2,560 examples/s"


def test_scattered_step_times_are_pointed_out():
    scattered = run("fused", step_ms={"p20": 80.0, "p50": 90.0, "p80": 121.0})
    (note,) = only_group(run(), scattered, CONTROL)[0]["notes"]
    assert note.startswith("step times of fused scatter") and "compare.rounds=3" in note


def test_runs_with_other_settings_are_another_group():
    configs = [{"model.dim": dim, "logger.every_steps": dim, "backend.name": name} for dim in (8, 9) for name in "ab"]
    runs = [run(config["backend.name"], config=config) for config in configs]
    groups = compare.compare(runs)["groups"]
    assert [[entry["path"] for entry in group["paths"]] for group in groups] == [["a", "b"]] * 2
    assert [group["settings"] for group in groups] == [{"model.dim": 8}, {"model.dim": 9}]
    assert "[model.dim=9]" in compare_report.text({"groups": groups})
    assert len(compare.compare([run(), run("fused", env=ENV | {"gpu": "NVIDIA H200"})])["groups"]) == 2
    newer = run("fused", config={"trainer.since_then": None})  # an option that the other run's version did not have
    assert len(compare.compare([run(), newer, run(config={"a": 1}, row_order=1)])["groups"]) == 1


def save(folder, backend, step, losses, error=None, **fields):
    (folder / ".hydra").mkdir(parents=True)
    config = {"backend": {"name": backend, "compile": False}, "attention": "fused", "model": {"name": "kunlun_tiny"}}
    (folder / ".hydra" / "config.yaml").write_text(json.dumps(config))
    if error:
        (folder / "failed.json").write_text(json.dumps({"error": error}))
        return
    (folder / "summary.json").write_text(json.dumps(summary(backend, step, **fields)))
    lines = [{"step": 2, "split": "train", "step_loss": losses[:2]}, {"step": 2, "split": "validation", "loss": 1.0},
             {"step": 4, "split": "train", "step_loss": losses[2:]}]  # fmt: skip
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 6, "spl')


@pytest.fixture
def sweep(tmp_path):
    save(tmp_path / "0", "unfused", 100, shifted(0))
    save(tmp_path / "1", "compiled", 0, (), error="RuntimeError: out of registers")
    save(tmp_path / "10", "naive", 120, shifted(5e-4))
    save(tmp_path / "2", "fused", 80, shifted(0.5))
    save(tmp_path / "control" / "0-1", "unfused", 90, shifted(-1e-3), row_order=1)
    return tmp_path


def test_the_command_rebuilds_everything_from_folders(sweep, tmp_path, capsys):
    out = tmp_path / "out"
    assert command.main(["compare", str(sweep), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "compiled failed: RuntimeError: out of registers" in shown and "DIVERGES" in shown
    (group,) = json.loads((out / "comparison.json").read_text())["groups"]
    assert [entry["path"] for entry in group["paths"]] == ["unfused", "compiled", "naive", "fused"]
    assert [entry["status"] for entry in group["paths"]] == ["agrees", "failed", "agrees", "diverged"]
    assert [entry["rank"] for entry in group["paths"]] == [1, None, 2, None]
    assert group["control"]["runs"] == 1 and group["curves"]["naive"] == pytest.approx(shifted(5e-4))
    assert (out / "comparison.md").read_text().count("\n| ") > 15
    assert command.main(["compare", *(str(sweep / name) for name in ("0", "10"))]) == 0  # single runs are fine, too
    assert (sweep / "0" / "comparison.json").exists()


def test_a_list_of_summaries_is_enough(tmp_path, capsys):
    (tmp_path / "train.json").write_text(json.dumps([summary(), summary("fused", 40)]))
    assert command.main(["compare", str(tmp_path / "train.json")]) == 0
    assert "2.50" in capsys.readouterr().out and (tmp_path / "comparison.svg").exists()


@pytest.mark.parametrize("name, told", [("nothing", "there is no such file or folder"), (".", "no finished run in")])
def test_nothing_to_compare_is_one_line(tmp_path, capsys, name, told):
    assert command.main(["compare", str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_a_setting_may_hold_a_dollar_sign(sweep, tmp_path):
    comparison = compare.compare(compare_runs.load([sweep]))
    comparison["groups"][0]["settings"] = {"trainer.max_steps": "${by_device:${trainer.device},60,300}"}
    assert all(path.stat().st_size > 1000 for path in compare_plot.plot(comparison, tmp_path))


def test_the_picture_is_a_light_card_on_nothing(sweep, tmp_path):
    from matplotlib import image

    comparison = compare.compare(compare_runs.load([sweep]))
    svg, png = compare_plot.plot(comparison, tmp_path)
    assert xml.parse(svg).getroot().tag.endswith("svg")
    pixels = image.imread(png)
    assert pixels.shape[2] == 4 and (pixels[[0, 0, -1, -1], [0, -1, 0, -1], 3] == 0).all()  # corners are transparent
    card = pixels[40:-40, 40:-40]
    assert (card[..., 3] == 1).all()
    assert np.median(card[..., :3].reshape(-1, 3), axis=0) == pytest.approx(
        [0xFB / 255, 0xFA / 255, 0xF7 / 255], abs=0.01
    )
    for color in (*(compare_plot.PHASES[name] for name in ("forward", "backward")), compare_plot.NORMS):
        wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(card[..., :3] - wanted).max(-1) < 0.01).sum() > 200, color


def test_clocks_are_medians_of_the_busiest_gpu(tmp_path):
    head = (
        "index, timestamp, clocks.current.sm [MHz], clocks.current.memory [MHz], power.draw [W], temperature.gpu, "
        "utilization.gpu [%]"
    )
    rows = ["0, t, 300, 800, 70, 30, 0", "1, t, 1900, 3200, 600, 60, 99", "1, t, 1700, 3200, 640, 61, 98",
            "1, t, 1980, 3200, [N/A], 61, 97", "0, t, 1980, 3200, 500, 50, 80", "1, t, 19"]  # fmt: skip
    (tmp_path / "clocks.csv").write_text("\n".join([head, *rows]))
    clocks = compare_runs._clocks(tmp_path / "clocks.csv")
    assert clocks == {"sm_mhz": 1900, "memory_mhz": 3200, "watts": 620, "celsius": 61, "sm_mhz_lowest": 1700}
    (tmp_path / "clocks.csv").write_text("")
    assert compare_runs._clocks(tmp_path / "clocks.csv") is None


def test_bench_train_is_a_sweep_with_fixed_settings(tmp_path, monkeypatch):
    given = []

    def sweep(argv):
        given.extend(argv)
        save(tmp_path / "speed" / "0", "unfused", 100, shifted(0))
        save(tmp_path / "speed" / "1", "fused", 0, (), error="RuntimeError: lost")
        raise SystemExit(1)

    monkeypatch.setattr("recsys_norm.training.main.main", sweep)
    options = ["--models", "kunlun_small", "--backends", "unfused,fused", "--out", str(tmp_path), "--name", "speed"]
    assert command.main(["train", *options, "trainer.max_steps=7"]) == 1
    assert given[:2] == ["train.py", "-m"] and {"experiment=benchmark", "model=kunlun_small"} <= set(given)
    assert given[-1] == "trainer.max_steps=7"
    assert [run["backend"] for run in json.loads((tmp_path / "speed.json").read_text())] == ["unfused"]
