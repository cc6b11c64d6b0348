"""A plot of all-reduce times: a group of bars per mesh and payload, in units of M/b where the link rate is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshmend.bench.allreduce import Result


def draw_times(results: Sequence[Result], path: Path) -> None:
    """Write the figure; the suffix of the path chooses the format. Needs matplotlib."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys((result.mesh, result.payload_bytes) for result in results))
    cases = list(dict.fromkeys(result.case for result in results))
    in_units = all(result.units for result in results)
    figure = Figure(figsize=(2.2 + 2.0 * len(groups), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(cases)
    for number, case in enumerate(cases):
        bars = [
            (groups.index((result.mesh, result.payload_bytes)), result.units or result.seconds)
            for result in results
            if result.case == case
        ]
        places = [place + (number - (len(cases) - 1) / 2) * width for place, _ in bars]
        drawn = axes.bar(places, [height for _, height in bars], width * 0.9, label=case)
        axes.bar_label(drawn, fmt="%.2f", fontsize=7)
    for place, group in enumerate(groups):
        some = next(result for result in results if (result.mesh, result.payload_bytes) == group)
        if some.units is not None and some.to_bound:
            bound = some.units / some.to_bound
            label = "bound" if place == 0 else "_again"
            axes.hlines(bound, place - 0.45, place + 0.45, colors="black", linestyles="dashed", label=label)
    axes.set_xticks(range(len(groups)), [f"{mesh}\n{size / 1e6:g} MB" for mesh, size in groups])
    axes.set_ylabel("time in units of M/b" if in_units else "seconds")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
