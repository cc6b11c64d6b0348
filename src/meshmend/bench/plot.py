"""Plots of all-reduce times: a group of bars per mesh and payload, in units of M/b where the link rate is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshmend.bench.jax_report import title
from meshmend.cost.units import name_bytes

if TYPE_CHECKING:
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


def draw_jax_times(facts: Mapping[str, Any], path: Path) -> None:
    """Write the figure of a measurement on JAX devices: a panel per payload, measured beside predicted."""
    from matplotlib.figure import Figure

    sizes = [choice["payload_bytes"] for choice in facts["choices"]]
    figure = Figure(figsize=(1.0 + 2.8 * len(sizes), 3.6), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        results = [result for result in facts["results"] if result["payload_bytes"] == size]
        for number, (key, label) in enumerate((("seconds", "measured"), ("predicted_s", "predicted"))):
            known = [(place, result[key]) for place, result in enumerate(results) if result[key] is not None]
            places = [place + (number - 0.5) * 0.4 for place, _ in known]
            axes.bar(places, [1e3 * seconds for _, seconds in known], 0.36, label=label)
        axes.set_xticks(range(len(results)), [result["case"] for result in results], rotation=45, ha="right")
        axes.set_title(name_bytes(size), fontsize=9)
        axes.set_ylabel("milliseconds")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle(title(facts), fontsize=10)
    figure.savefig(path)
