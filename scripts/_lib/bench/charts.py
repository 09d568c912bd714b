"""Charts of measurements: what a loop's claim costs, against what waits and against what is pending."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _lib.bench.report import Row, Times


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Write the charts, one for each question with a panel for each database, and return their paths."""
    import matplotlib as mpl

    mpl.use("svg")
    # The same measurements give the same file.
    mpl.rcParams.update({"svg.hashsalt": "wake", "svg.fonttype": "none", "font.size": 9})
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, label, lines in (
        ("requests", "waiting requests", _against_requests(rows)),
        ("pending", "pending runs", _against_pending(rows)),
    ):
        if lines:
            made.append(folder / f"claim-{name}.svg")
            _draw(made[-1], label, lines)
    return made


Lines = dict[str, dict[str, list[tuple[int, Times]]]]
"""For each database, for each line, its points."""


def _against_requests(rows: Iterable[Row]) -> Lines:
    lines: Lines = {}
    for row in rows:
        if row.case == "claim" and "requests" in row.more and row.stock and row.ours:
            panel = lines.setdefault(row.backend, {"stock": [], "ours": []})
            panel["stock"].append((row.more["requests"], row.stock))
            panel["ours"].append((row.more["requests"], row.ours))
    return lines


def _against_pending(rows: Iterable[Row]) -> Lines:
    lines: Lines = {}
    for row in rows:
        if row.case == "growth" and row.stock and row.ours:
            panel = lines.setdefault(row.backend, {"stock": [], "ours, idle": [], "ours, 500 requests": []})
            if row.more["state"] == "idle":
                panel["stock"].append((row.more["pending"], row.stock))
                panel["ours, idle"].append((row.more["pending"], row.ours))
            else:
                panel["ours, 500 requests"].append((row.more["pending"], row.ours))
    return lines


def _draw(path: Path, label: str, lines: Lines) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(lines), figsize=(4.2 * len(lines), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (backend, of_backend) in zip(panels[0], sorted(lines.items(), reverse=True), strict=True):
        for (name, points), colour in zip(
            of_backend.items(), ("#c0392b", "#2471a3", "#17a589"), strict=False
        ):
            _line(panel, name, sorted(points, key=lambda point: point[0]), colour)
        panel.set(title=backend, xlabel=label, xscale="log", yscale="log")
        panel.grid(which="major", linewidth=0.4, alpha=0.6)
    panels[0][0].set_ylabel("claim of one loop, ms (median; min to max)")
    panels[0][0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _line(panel: Any, name: str, points: list[tuple[int, Times]], colour: str) -> None:
    at = [count for count, _ in points]
    panel.plot(
        at, [1000 * times.median for _, times in points], marker="o", markersize=3, color=colour, label=name
    )
    panel.fill_between(
        at,
        [1000 * min(times.values) for _, times in points],
        [1000 * max(times.values) for _, times in points],
        color=colour,
        alpha=0.15,
        linewidth=0,
    )
