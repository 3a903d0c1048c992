"""The examples do what they say."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore:.*cannot run.*:UserWarning")


def example(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fused_block():
    losses = example("fused_block").main()
    assert losses[-1] < 0.8 * losses[0]


def test_convert_dlrm():
    report, before, after, difference = example("convert_dlrm").main(rows=256, repeats=3)
    assert sorted(kind for kind, _ in report.replaced) == ["linear_norm_linear", "norm", "norm_linear"], str(report)
    assert before > 0 and after > 0 and difference < 1e-4


def test_hstu():
    first, last = example("hstu").main()
    assert last < 0.7 * first


def test_custom_loop():
    losses = example("custom_loop").main()
    assert losses[-1] < 0.85 * losses[0]


def test_export(tmp_path):
    assert example("export_model").main(tmp_path) < 1e-5


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_under_80_lines(path):
    assert len(path.read_text().splitlines()) <= 80
