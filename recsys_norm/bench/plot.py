"""Pictures of measurements. They stand on a white card, so that they read the same in light and dark themes."""

from __future__ import annotations

from pathlib import Path

COLORS = {"unfused": "#9aa0a6", "compiled": "#5f8dd3", "fused": "#1e8e5a"}


def plot_ops(result: dict, path: Path) -> None:
    """Time of each backend over the cuBLAS GEMMs alone, per case: 1.0 means that the norm is free."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows: dict[tuple, dict[str, dict]] = {}
    for r in result["records"]:
        if r.get("ms"):
            key = (r["op"], r["norm"], r["direction"], r["K"], r["N"], r["M"])
            rows.setdefault(key, {})[r["backend"]] = r
    panels = list(dict.fromkeys(key[:3] for key in rows))
    if not panels:
        return
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(10, 2.6 * len(panels)), squeeze=False)
    for axis, panel in zip(axes[:, 0], panels):
        chosen = {k: v for k, v in rows.items() if k[:3] == panel}
        for i, row in enumerate(chosen.values()):
            for j, label in enumerate(COLORS):
                if label in row:
                    ratio = row[label]["ms"] / row[label]["gemm_ms"]
                    axis.bar(i + 0.27 * (j - 1), ratio, 0.25, color=COLORS[label], label=label if i == 0 else None)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(chosen)), [f"{k[3]}→{k[4]}" for k in chosen])
        axis.set_ylabel("time / GEMM alone")
        axis.set_title(f"{panel[0]}, {panel[1]}, {panel[2]}", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False, ncols=3, loc="upper right")
    first = next(iter(rows))
    figure.suptitle(f"{result['env'].get('gpu')}, M = {first[5]:,}, {result['records'][0]['dtype']}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=140, facecolor="white")
    pyplot.close(figure)
