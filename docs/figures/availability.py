"""Draw docs/figures/availability.svg: a year of 1,024 chips under each policy, and how that changes with its failures.

    python docs/figures/availability.py

It takes minutes, and matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from meshmend_lab.availability import Assumptions, Study, simulate
from meshmend_lab.availability.simulate import LOSSES, sweep
from meshmend_lab.availability.throughput import Throughput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can distinguish; the losses differ in brightness and hatching too.
_ANSWER_LOOKS = {
    "quick repair": ("#0072B2", "o"),
    "sub-mesh": ("#E69F00", "s"),
    "hot spares": ("#CC79A7", "^"),
    "optical cubes": ("#882255", "v"),
    "dynamic slices": ("#DDAA33", "X"),
    "elastic slices": ("#6B5B3E", "P"),
    "fault-tolerant": ("#009E73", "D"),
}
_LOSS_LOOKS = {
    "waiting": ("#333333", None),
    "restarting": ("#D55E00", None),
    "lost work": ("#F0E442", "////"),
    "checkpoints": ("#56B4E9", None),
    "fewer chips": ("#cfcfcf", "...."),
}


def plot(study: Study, swept: Sequence[tuple[float, Study]], path: Path) -> None:
    """Draw the study on the left and the sweep on the right; save to `path`."""
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    _bars(left, study)
    _curves(right, swept)
    figure.suptitle(
        f"{study.assumptions.mesh} chips, {study.days:g} days, {study.runs} runs; whiskers are 95 % intervals",
        x=0.01,
        ha="left",
        fontsize=12,
    )
    figure.savefig(path, dpi=150)


def _bars(axes: Axes, study: Study) -> None:
    outcomes = list(reversed(study.outcomes))
    positions = list(range(len(outcomes)))
    goodputs = [100 * outcome.goodput.mean for outcome in outcomes]
    colours = [_ANSWER_LOOKS[outcome.name][0] for outcome in outcomes]
    axes.barh(positions, goodputs, color=colours, height=0.56)
    left = list(goodputs)
    for cause in reversed(LOSSES):
        widths = [100 * outcome.losses[cause].mean for outcome in outcomes]
        colour, hatch = _LOSS_LOOKS[cause]
        axes.barh(
            positions, widths, left=left, color=colour, hatch=hatch, height=0.56, label=cause, edgecolor="white", lw=0.5
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    spans = [_shown(outcome.goodput.half_width) for outcome in outcomes]
    axes.errorbar(goodputs, positions, xerr=spans, fmt="none", ecolor="black", capsize=4, lw=1.4)
    low = max(0.0, 5 * math.floor(min(goodputs) / 5 - 1))
    for position, outcome in zip(positions, outcomes, strict=True):
        text = f"{100 * outcome.goodput.mean:.1f} %, \\${outcome.cost.mean:.2f} per useful chip-hour"
        axes.text(low + (100 - low) * 0.01, position + 0.33, text, va="bottom", ha="left", fontsize=10)
    axes.set_yticks(positions, [outcome.name for outcome in outcomes])
    axes.set_xlim(low, 100)
    axes.set_ylim(-0.5, len(positions) - 0.35)
    axes.set_xlabel(f"% of an ideal machine (axis from {low:g} %)")
    axes.set_title("goodput, and where the rest went", loc="left", fontsize=11)
    axes.legend(ncols=len(LOSSES), frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.13), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _curves(axes: Axes, swept: Sequence[tuple[float, Study]]) -> None:
    if not swept:
        return
    hours = [1 / study.assumptions.failures_per_h for _, study in swept]
    for number, outcome in enumerate(swept[0][1].outcomes):
        colour, marker = _ANSWER_LOOKS[outcome.name]
        estimates = [study.outcomes[number].goodput for _, study in swept]
        axes.errorbar(
            hours,
            [100 * estimate.mean for estimate in estimates],
            yerr=[_shown(estimate.half_width) for estimate in estimates],
            color=colour,
            marker=marker,
            capsize=3,
            lw=2,
            label=outcome.name,
        )
    axes.set_xscale("log")
    axes.set_xticks(hours, [f"{hour:.0f} h" if hour >= 10 else f"{hour:.2g} h" for hour in hours])
    axes.minorticks_off()
    axes.set_ylim(top=100)
    axes.set_xlabel("mean time between failures of the machine")
    axes.set_ylabel("goodput, %")
    axes.set_title("if it fails more, or less, often", loc="left", fontsize=11)
    axes.grid(visible=True, color="#dddddd", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")


def _shown(half_width: float) -> float:
    return 100 * half_width if math.isfinite(half_width) else 0.0


def main() -> None:
    machine = Assumptions.of("32x32")
    known = Throughput(machine)
    study = simulate(machine, throughput=known)
    plot(study, sweep(study, known), Path(__file__).with_suffix(".svg"))


if __name__ == "__main__":
    main()
