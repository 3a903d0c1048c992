"""Build the documentation: `python docs/build.py [folder]`, by default `docs/_site`.

The pages of this folder become HTML, the reference comes from the docstrings, and tables of what was measured from
`benchmarks/ops_h200.json`. A warning, a link that leads nowhere or a technique without a page ends it with an error.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import markdown2
import pdoc
import pdoc.render

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs"
MODULES = (
    "recsys_norm.ops",
    "recsys_norm.ops.activations",
    "!recsys_norm.ops.(norm_linear|linear_norm|linear_norm_linear|norm_attention|jagged_attention)",  # on the page of ops
    "recsys_norm.nn",
    "recsys_norm.conversion",
    "recsys_norm.testing",
    "recsys_norm.reference",
    "recsys_norm.models",
    "recsys_norm.data.schema",
    "recsys_norm.data.batch",
    "recsys_norm.env",
)
TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; font-size: 14px }}
th, td {{ border: 1px solid #ccd; padding: .25rem .6rem; text-align: left }}
pre {{ background: #f5f6f8; padding: .7rem 1rem; overflow-x: auto }} img {{ max-width: 100% }}
</style></head><body><nav><a href="{home}">recsys_norm</a></nav>
{body}
</body></html>
"""


def build(site: Path) -> None:
    shutil.rmtree(site, ignore_errors=True)
    problems = reference(site)
    for source in sorted(PAGES.rglob("*.md")):
        target = site / source.relative_to(PAGES).with_suffix(".html")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page(source))
    shutil.copytree(PAGES / "techniques" / "pictures", site / "techniques" / "pictures")
    problems += broken_links(site) + without_a_page()
    if problems:
        raise SystemExit("docs: " + "\ndocs: ".join(problems))


def reference(site: Path) -> list[str]:
    """Write the pages of the modules; returns what pdoc warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)  # of what the modules import; pdoc gives none
        pdoc.render.configure(docformat="google", show_source=False)
        pdoc.pdoc(*MODULES, output_directory=site)
    return [f"{w.category.__name__}: {w.message}" for w in caught]


def page(source: Path) -> str:
    text = re.sub(r"<!-- measured: (\w+) -->", lambda m: measured(m.group(1)), source.read_text())
    text = re.sub(r"\]\(([\w./]+)\.md\)", r"](\1.html)", text)
    body = markdown2.markdown(text, extras=["tables", "header-ids"])
    home = "../" * (len(source.relative_to(PAGES).parts) - 1) + "index.html"
    return TEMPLATE.format(title=text.split("\n", 1)[0].lstrip("# "), home=home, body=body)


def measured(technique: str) -> str:
    """Rows of the benchmark as a table, or that there are none."""
    file = ROOT / "benchmarks" / "ops_h200.json"
    result = json.loads(file.read_text()) if file.exists() else {"records": []}
    rows = [r for r in result["records"] if r["backend"].endswith(f"/{technique}") and r["ms"] is not None]
    if not rows:
        return "Not measured: `benchmarks/ops_h200.json` has no row of it."
    lines = [
        f"On one {result['env']['gpu']}, milliseconds (`benchmarks/ops_h200.json`):\n",
        "| op | norm | direction | M | K → N | provider | GEMM | norm alone | this | hidden |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        widths = " → ".join(str(r[k]) for k in ("K", "N", "N2") if r.get(k))
        times = " | ".join(f"{r[k]:.3f}" for k in ("gemm_ms", "norm_ms", "ms"))
        case = f"| {r['op']} | {r['norm']} | {r['direction']} | {r['M']} | {widths} | {r['backend'].split('/')[0]} "
        lines.append(f"{case}| {times} | {r['hidden']:.0%} |")
    return "\n".join(lines)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {given["id"] or ""} if "id" in given else set()
        self.links += [given[key] or "" for key in ("href", "src") if key in given]


def broken_links(site: Path) -> list[str]:
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = parser = _Links()
        parser.feed(path.read_text())
    broken = []
    for path, parser in pages.items():
        for link in parser.links:
            if re.match(r"\w+:|//", link):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].ids):
                broken.append(f"{path.relative_to(site.resolve())} links to {link}, which does not exist")
    return broken


def without_a_page() -> list[str]:
    from recsys_norm.ops import registry

    names = {t.name for op in registry._ORDER for t in registry.techniques(op)}
    return [f"technique {n} has no page" for n in sorted(names) if not (PAGES / "techniques" / f"{n}.md").exists()]


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGES / "_site"
    build(folder)
    print(f"built {folder}")
