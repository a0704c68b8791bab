"""The look of every chart, and the few kinds there are. matplotlib is imported when one is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .extras import require

INK, MUTED, LINE = "#1f2933", "#52606d", "#cbd2d9"
TITLE_COLUMNS = 100  # as many as a figure of 11 inches holds
OURS, OTHER, BAD = "#0f766e", "#b8c2cc", "#c2410c"


def pyplot() -> Any:
    """matplotlib.pyplot without a display, in this look."""
    require("matplotlib").use("Agg")
    plt = require("matplotlib.pyplot")
    plt.rcParams.update(
        {"font.size": 10, "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
         "axes.edgecolor": LINE, "svg.hashsalt": "liger-losses"}
    )  # fmt: skip
    return plt


def save(figure: Any, path: Path, title: str = "") -> None:
    """Write `path` (png, svg or pdf by its suffix), the title above, and close the figure."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        lines = textwrap.wrap(title, TITLE_COLUMNS)
        figure.set_figheight(figure.get_figheight() + 0.2 * (len(lines) - 1))
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=12, color=MUTED)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the date, the same numbers are the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=160, facecolor="white", metadata=metadata)
    pyplot().close(figure)


def bars(
    axes: Any, title: str, values: Mapping[str, float], ours: Sequence[str], unit: str, *, floor: float | None = None
) -> None:
    """Horizontal bars from the top, each with its number; `floor` is a dashed line."""
    names = list(values)
    drawn = axes.barh(
        names, list(values.values()), color=[OURS if name in ours else OTHER for name in names], height=0.62
    )
    axes.invert_yaxis()
    for bar, value in zip(drawn, values.values(), strict=True):
        text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        axes.annotate(
            text, (value, bar.get_y() + bar.get_height() / 2), xytext=(4, 0), textcoords="offset points", va="center"
        )
    if floor is not None:
        axes.axvline(floor, color=BAD, lw=1, ls=(0, (4, 3)))
        unit += "  (dashed: the matrix products of the exact gradient alone)"
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.xaxis.set_major_locator(pyplot().MaxNLocator(5))
    axes.set_xlim(0, 1.18 * max(values.values(), default=1.0))
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(unit)
    axes.tick_params(axis="y", length=0, labelcolor=INK)


def time_and_memory(
    path: Path,
    title: str,
    milliseconds: Mapping[str, float],
    mib: Mapping[str, float],
    ours: Sequence[str],
    *,
    floor: float | None = None,
    memory: str = "MiB beyond inputs and returned gradients",
) -> None:
    """Two panels of bars, one way of computing the same to each line."""
    plt = pyplot()
    size = (11, 1.5 + 0.36 * len(milliseconds))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    bars(left, "Time", milliseconds, ours, "ms, forward and backward", floor=floor)
    bars(right, "Peak memory", mib, ours, memory)
    right.invert_yaxis()  # shared: once is enough
    save(figure, path, title)


def rewards_and_head(
    history: Sequence[Mapping[str, float]], head: Mapping[str, tuple[float, float]], path: Path, title: str
) -> None:
    """Training rewards over steps (as TRL logs them), and (MiB, ms) of the loss head by way of computing it."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), width_ratios=[1.7, 1], layout="constrained")
    logged = [entry for entry in history if "rewards/margins" in entry]
    steps = [entry["step"] for entry in logged]
    left.fill_between(steps, 0, [entry["rewards/margins"] for entry in logged], color=OURS, alpha=0.10, lw=0)
    for name, colour, label in (
        ("rewards/margins", OURS, "margin"),
        ("rewards/chosen", INK, "chosen"),
        ("rewards/rejected", BAD, "rejected"),
    ):
        values = [entry[name] for entry in logged]
        left.plot(steps, values, color=colour, lw=2.2 if label == "margin" else 1.5)
        left.annotate(
            label, (steps[-1], values[-1]), xytext=(6, 0), textcoords="offset points", color=colour, va="center"
        )
    left.axhline(0, color=LINE, lw=0.8, zorder=0)
    left.set(xlabel="step", ylabel="implicit reward  β log π/π_ref")
    left.set_title("Training rewards", loc="left", fontweight="bold")
    left.margins(x=0.02)
    names = list(head)
    drawn = right.bar(names, [head[name][0] for name in names], color=[OTHER, OURS], width=0.55)
    for bar, name in zip(drawn, names, strict=True):
        mib, milliseconds = head[name]
        right.annotate(f"{mib:.1f} MiB\n{milliseconds:.0f} ms", (bar.get_x() + bar.get_width() / 2, mib),
                       xytext=(0, 4), textcoords="offset points", ha="center", color=INK)  # fmt: skip
    right.set(ylabel="peak MiB, forward + backward", ylim=(0, 1.22 * max(mib for mib, _ in head.values())))
    right.set_title("Loss head on one batch", loc="left", fontweight="bold")
    right.tick_params(axis="x", length=0, labelcolor=INK)
    save(figure, path, title)
