"""The documentation builds without a warning and says what the code says; public names have docstrings."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recsys_norm import conversion, nn, ops
from recsys_norm.ops import registry

pytest.importorskip("pdoc")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, str(ROOT / "docs" / "build.py"), str(target)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return target


def test_every_public_name_is_on_a_page(site):
    for module in (ops, nn, conversion):
        text = (site / (module.__name__.replace(".", "/") + ".html")).read_text()
        missing = [name for name in module.__all__ if f'id="{name}"' not in text]
        assert not missing, f"{module.__name__}: {missing}"


def test_techniques_show_a_picture_and_what_was_measured(site):
    pages = sorted((site / "techniques").glob("*.html"))
    assert {"separate", "naive", "lazy", "cluster", "deferred", "flashnorm"} <= {page.stem for page in pages}
    for page in pages:
        text = page.read_text()
        assert f'src="pictures/{page.stem}.svg"' in text
        assert "<!-- measured" not in text
        assert "Not measured: <code>benchmarks/ops_h200.json" in text or "<th>hidden</th>" in text, page.stem
        assert all(f">{heading}</h2>" in text for heading in ("Formula", "Limits", "Measured")), page.stem


@pytest.mark.parametrize("module", [ops, nn, conversion], ids=lambda m: m.__name__)
def test_public_names_have_docstrings(module):
    bare = [name for name in module.__all__ if not inspect.getdoc(getattr(module, name))]
    assert not bare


def test_a_broken_link_and_a_missing_page_stop_the_build(tmp_path):
    """On a copy of the pages, with the reference left out to be quick."""
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "techniques" / "pictures").mkdir(parents=True)
    (tmp_path / "index.md").write_text("# Pages\n\n[gone](techniques/gone.md)\n")
    module.PAGES, module.reference = tmp_path, lambda site: ["UserWarning: a docstring"]
    with pytest.raises(SystemExit) as stopped:
        module.build(tmp_path.parent / "site")
    message = str(stopped.value)
    assert "index.html links to techniques/gone.html, which does not exist" in message
    assert "technique separate has no page" in message and "UserWarning: a docstring" in message


def test_the_index_names_every_technique():
    index = (ROOT / "docs" / "index.md").read_text()
    listed = set(re.findall(r"\(techniques/(\w+)\.md\)", index))
    assert listed == {t.name for op in registry._ORDER for t in registry.techniques(op)}
