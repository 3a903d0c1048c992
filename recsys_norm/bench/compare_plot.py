"""The picture of a comparison: bars of step time by phase with the norms' cost under them, and the loss curves.

It stands on a light card with round corners and nothing around it, so it reads the same on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recsys_norm.bench.compare import is_fallback, why_fallback

CARD, EDGE, INK, MUTED, FAINT, GRID = "#fbfaf7", "#dedad2", "#1f2933", "#66707c", "#a9b1bb", "#e7e4dd"
NORMS, GOOD, BAD = "#e0562b", "#1b7f4f", "#b3261e"
PHASES = {"data": "#c3c9d1", "forward": "#86b0e0", "backward": "#3f74b8", "optimizer": "#8b7bb8"}
PATHS = {"unfused": "#6b7785", "compiled": "#3f74b8", "naive": "#c58b1b", "fused": "#1b9e6b"}
_DASHES = {"unfused": (0, ()), "compiled": (0, (6, 2)), "naive": (0, (2, 1.6)), "fused": (0, (1, 1))}
_WIDTH, _HEAD, _ROW, _FOOT, _LEAST = 12.5, 1.05, 0.82, 0.95, 4.4  # inches


def plot(comparison: dict[str, Any], folder: Path) -> list[Path]:
    """Write comparison.svg and comparison.png, a card with a section per group; returns their paths."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "recsys_norm", "font.size": 9}):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        heights = [max(_LEAST, _HEAD + _ROW * len(group["paths"]) + _FOOT) for group in comparison["groups"]]
        figure = Figure(figsize=(_WIDTH, sum(heights)))
        FigureCanvasAgg(figure)
        figure.patch.set_alpha(0)
        _card(figure)
        top = sum(heights)
        for group, height in zip(comparison["groups"], heights):
            _group(figure, group, (top - height) / sum(heights), height / sum(heights), height)
            top -= height
        files = [folder / "comparison.svg", folder / "comparison.png"]
        for file in files:
            figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _card(figure: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    width, height = figure.get_size_inches()
    inset, radius = 0.06, 0.18
    box = FancyBboxPatch(
        (inset + radius, inset + radius),
        width - 2 * (inset + radius),
        height - 2 * (inset + radius),
        boxstyle=f"round,pad={radius},rounding_size={radius}",
        transform=figure.dpi_scale_trans,
        zorder=-1,
        facecolor=CARD,
        edgecolor=EDGE,
        linewidth=1,
    )
    figure.add_artist(box)


def _group(figure: Any, group: dict[str, Any], bottom: float, share: float, inches: float) -> None:
    """One section; `bottom` and `share` are fractions of the figure's height."""

    def at(y: float) -> float:
        return bottom + share * (1 - y / inches)

    figure.text(0.03, at(0.42), headline(group), fontsize=14, fontweight="bold", color=INK, va="center")
    settings = "  ".join(f"{key}={value}" for key, value in group["settings"].items())
    told = _cut(f"{group['title']}   {settings}".strip(), 220)
    figure.text(0.03, at(0.70), told, fontsize=9, color=MUTED, va="center", parse_math=False)
    drawn = sum(1 for losses in group["curves"].values() if len(losses) > 1)
    low, high = at(inches - _FOOT), at(_HEAD + 0.1)
    bars = figure.add_axes((0.125, low, 0.44 if drawn else 0.80, high - low))
    _bars(bars, group["paths"])
    if not drawn:
        return
    split = low + 0.42 * (high - low)
    curves = figure.add_axes((0.665, split + 0.03 * share, 0.305, high - split - 0.03 * share))
    differences = figure.add_axes((0.665, low, 0.305, split - low - 0.06 * share), sharex=curves)
    _curves(curves, group)
    _differences(differences, group)


def headline(group: dict[str, Any]) -> str:
    """The comparison in one sentence."""
    paths = {entry["path"]: entry for entry in group["paths"]}
    own = [e for e in paths.values() if e["rank"] and not is_fallback(e) and e["backend"] != "unfused"]
    best = min(own, key=lambda e: e["rank"], default=None)
    if best is None or (best["gain"]["norms"] or 0) <= 1:
        ranked = sorted((e for e in paths.values() if e["rank"]), key=lambda e: e["rank"])
        return (
            f"Fastest: {ranked[0]['path']}, {ranked[0]['examples_per_s']:,.0f} examples/s" if ranked else "No ranking"
        )
    sentence = f"{best['path']} trains {best['gain']['norms']:.2f}x as fast as unfused"
    if best["backend"] != "compiled" and best["gain"]["compiled"]:
        sentence += f" and {best['gain']['compiled']:.2f}x as fast as compiled"
    return sentence


# -- bars


def _bars(axis: Any, paths: Sequence[dict[str, Any]]) -> None:
    ends = [sum(ms or 0 for ms in entry["phase_ms"].values()) for entry in paths]
    longest = max([*ends, 1e-9])
    for row, (entry, end) in enumerate(zip(paths, ends)):
        y = len(paths) - 1 - row
        _label(axis, entry, y)
        if end:
            _stack(axis, entry, y, longest)
            _norms(axis, entry, y, end, longest)
            _result(axis, entry, y, end, longest)
        else:
            axis.text(0, y, _cut(entry["error"] or "no step was timed", 62), va="center", fontsize=8.5, color=BAD,
                      parse_math=False)  # fmt: skip
    inches = axis.get_position().height * axis.figure.get_size_inches()[1]
    spare = inches / _ROW - len(paths)
    axis.set_ylim(-0.55 - spare / 2, len(paths) - 0.55 + spare / 2)
    axis.set_xlim(0, max([longest, *(entry["step_ms"]["p80"] or 0 for entry in paths)]) + 0.40 * longest)
    axis.set_yticks([])
    axis.set_facecolor("none")
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axis.tick_params(axis="x", length=0, colors=MUTED, labelsize=8)
    axis.xaxis.grid(True, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    ticks = [tick for tick in axis.get_xticks() if 0 <= tick <= 1.05 * longest] if any(ends) else []
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    _key(axis, inches, norms=any(entry["norm_ms"] is not None for entry in paths))
    why = next((reason for entry in paths if is_fallback(entry) for reason in why_fallback(entry)), None)
    if why:
        told = f"fallback: {_cut(why, 100)}"
        axis.annotate(
            told, (0, 0), (0, -45), xycoords="axes fraction", textcoords="offset points", fontsize=8, color=NORMS
        )


def _label(axis: Any, entry: dict[str, Any], y: float) -> None:
    transform = axis.get_yaxis_transform()
    name, _, below = entry["path"].partition(", ")
    color, faded = MUTED, entry["status"] in ("failed", "diverged", "not comparable")
    if faded:
        below, color = {"failed": "failed", "diverged": "diverges"}.get(entry["status"], "other start"), BAD
    elif entry["fallbacks"]:
        whole = is_fallback(entry)
        below, color = ("fallback" if whole else f"{entry['fallback_share']:.0%} fallback"), NORMS
    place = {"transform": transform, "ha": "right", "va": "center"}
    ink, size = FAINT if faded else INK, 11.5 if len(name) < 10 else 9.5
    axis.text(-0.02, y + (0.09 if below else 0.0), name, fontsize=size, fontweight="bold", color=ink, **place)
    axis.text(-0.02, y - 0.20, below, fontsize=8.5, color=color, **place)


def _stack(axis: Any, entry: dict[str, Any], y: float, longest: float) -> None:
    left, faded = 0.0, 0.35 if entry["rank"] is None else 1.0
    plain = sum(ms or 0.0 for ms in entry["phase_ms"].values()) - max(entry["norm_ms"] or 0.0, 0.0)  # not hatched
    for phase, color in PHASES.items():
        ms = entry["phase_ms"].get(phase) or 0.0
        axis.barh(y, ms, 0.46, left=left, color=color, alpha=faded, edgecolor=CARD, linewidth=1.2)
        room = min(left + ms, plain) - left
        if room > 0.11 * longest:
            ink = "white" if phase in ("backward", "optimizer") else INK
            axis.text(left + room / 2, y, f"{ms:.1f}", ha="center", va="center", fontsize=8.5, color=ink)
        left += ms


def _norms(axis: Any, entry: dict[str, Any], y: float, end: float, longest: float) -> None:
    """The end of the bar that would not be there if norms cost nothing."""
    if entry["norm_ms"] is None:
        return
    ms = max(entry["norm_ms"], 0.0)
    axis.barh(y, ms, 0.46, left=end - ms, color="none", edgecolor="#ffffff", hatch="////", linewidth=0, alpha=0.55)
    axis.barh(y - 0.30, ms, 0.07, left=end - ms, color=NORMS)
    told = f"norms {entry['norm_ms']:.1f} ms, {entry['norm_cost']:.0%}"
    x, side = (end - ms - 0.01 * longest, "right") if end - ms > 0.30 * longest else (end + 0.01 * longest, "left")
    axis.text(x, y - 0.335, told, ha=side, va="center", fontsize=8, color=NORMS)


def _result(axis: Any, entry: dict[str, Any], y: float, end: float, longest: float) -> None:
    step = entry["step_ms"]
    x = max(end, step["p80"] or 0) + 0.025 * longest
    if step["p20"] is not None:
        axis.plot([step["p20"], step["p80"]], [y, y], color=INK, linewidth=1.1, alpha=0.7, solid_capstyle="butt")
    ranked = entry["rank"] is not None
    axis.text(x, y + 0.09, f"{step['p50']:.1f} ms", va="center", fontsize=10.5, fontweight="bold",
              color=INK if ranked else FAINT)  # fmt: skip
    told = f"{entry['examples_per_s']:,.0f} examples/s"
    axis.text(x, y - 0.13, told, va="center", fontsize=8, color=MUTED)
    gain = entry["gain"]["norms"]
    if gain is not None and entry["backend"] != "unfused":
        color = GOOD if gain > 1.005 else MUTED
        axis.annotate(f"{gain:.2f}x", (x, y + 0.09), (66, 0), textcoords="offset points", va="center", fontsize=10.5,
                      fontweight="bold", color=color)  # fmt: skip


def _key(axis: Any, inches: float, norms: bool) -> None:
    """The legend, below an axis of this height."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, label=phase) for phase, color in PHASES.items()]
    if norms:
        handles.append(Patch(facecolor=NORMS, label="what the norms cost"))
    axis.legend(handles=handles, ncols=5, frameon=False, fontsize=8, labelcolor=MUTED, handlelength=0.9,
                handleheight=0.8, columnspacing=1.3, handletextpad=0.5, loc="upper left",
                bbox_to_anchor=(-0.01, -0.27 / inches), borderaxespad=0)  # fmt: skip
    axis.text(
        -0.02, -0.07 / inches, "ms a step", transform=axis.transAxes, ha="right", va="top", fontsize=8, color=MUTED
    )


# -- curves


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` values."""
    result, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        result.append(total / min(index + 1, window))
    return result


def _window(length: int) -> int:
    return max(1, length // 25)


def _style(entry: dict[str, Any]) -> dict[str, Any]:
    color = PATHS.get(entry["backend"], INK)
    if entry["attention"] == "eager":
        return {"color": color, "linestyle": (0, (1, 2.5)), "linewidth": 1.4}
    dash = _DASHES.get(entry["backend"], (0, ()))
    return {"color": color, "linestyle": dash, "linewidth": 4.5 if entry["backend"] == "unfused" else 1.7}


def _plain(axis: Any, title: str) -> None:
    axis.set_facecolor("none")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    axis.tick_params(length=0, colors=MUTED, labelsize=8)
    axis.yaxis.grid(True, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_title(title, loc="left", fontsize=9, color=MUTED, pad=5)


def _curves(axis: Any, group: dict[str, Any]) -> None:
    _plain(axis, "training loss")
    for entry in group["paths"]:
        losses = group["curves"].get(entry["path"])
        if not losses or len(losses) < 2:
            continue
        style = _style(entry)
        alpha = 0.35 if entry["backend"] == "unfused" and entry["attention"] == "fused" else 0.95
        steps = range(1, len(losses) + 1)
        axis.plot(steps, smooth(losses, _window(len(losses))), alpha=alpha, label=entry["path"], **style)
    axis.tick_params(labelbottom=False)
    axis.legend(frameon=False, fontsize=8, labelcolor=INK, handlelength=2.4, loc="upper right", borderaxespad=0)


def _differences(axis: Any, group: dict[str, Any]) -> None:
    reference, control = group["reference"], group["control"]
    _plain(axis, f"|loss - loss of {reference}|")
    base = group["curves"][reference]
    axis.set_yscale("log")
    axis.minorticks_off()
    axis.set_xlabel("step", fontsize=8, color=MUTED, labelpad=2)
    floor, drawn = 1e-9, []
    if control:
        for number, curve in enumerate(control["curves"]):
            ours = _distance(curve, base, floor)
            drawn += ours
            label = "other order of rows (control)" if number == 0 else None
            axis.fill_between(
                range(1, len(ours) + 1), floor / 10, ours, color="#9aa3ad", alpha=0.28, linewidth=0, label=label
            )
        limit = next(entry["curve"]["limit"] for entry in group["paths"] if entry.get("curve"))
        axis.axhline(max(limit, floor), color=BAD, linewidth=1, linestyle=(0, (4, 3)), label="allowed mean")
        drawn.append(max(limit, floor))
    for entry in group["paths"]:
        losses = group["curves"].get(entry["path"])
        if entry["path"] == reference or not losses or len(losses) < 2:
            continue
        ours = _distance(losses, base, floor)
        drawn += ours
        style = _style(entry) | {"linestyle": "-" if entry["attention"] != "eager" else ":", "linewidth": 1.3}
        axis.plot(range(1, len(ours) + 1), ours, **style)
    if drawn:  # the first steps are all but equal
        axis.set_ylim(max(min(drawn), max(drawn) / 1e5), 4 * max(drawn))
    handles = axis.get_legend_handles_labels()[0]
    inches = axis.get_position().height * axis.figure.get_size_inches()[1]
    if handles:
        axis.legend(frameon=False, fontsize=7.5, labelcolor=MUTED, loc="upper left", borderaxespad=0, ncols=2,
                    handlelength=1.8, bbox_to_anchor=(0, -0.34 / inches))  # fmt: skip


def _distance(losses: Sequence[float], base: Sequence[float], floor: float) -> list[float]:
    """Smoothed |a_t - b_t|, at least `floor`, where equal losses would leave a logarithmic axis."""
    distance = [abs(a - b) if a is not None and b is not None else 0.0 for a, b in zip(losses, base)]
    return [max(value, floor) for value in smooth(distance, _window(len(distance)))]


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
