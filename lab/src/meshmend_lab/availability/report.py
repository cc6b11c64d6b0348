"""Report: a study as one HTML page for the decision-maker, which needs no other file and no network.

It says what the policies are worth in goodput and money, what one failure costs, and every assumption with its
source. Nothing in it runs; names from outside are escaped.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files

from meshmend.cost.units import name_rate, name_seconds
from meshmend_lab.availability.assumptions import SOURCES, TABLE, Assumptions, name_payload
from meshmend_lab.availability.simulate import LOSSES, Estimate, Outcome, Study

HOURS = 8760
"""Of a year."""
DOES = {
    "quick repair": "wait until everything is repaired, by a crew on site",
    "sub-mesh": "train on the largest healthy rectangle of whole hosts",
    "hot spares": "swap in a spare host; with none left, wait",
    "optical cubes": "switch a spare cube in; with none left, wait",
    "dynamic slices": "restart on a smaller slice of the cubes that are whole",
    "elastic slices": "train on the other slices, until the lost one is replaced",
    "fault-tolerant": "train on all remaining chips, round the hole",
}
"""What a job does under each policy."""
_LOOKS = dict(zip(LOSSES, ("waiting", "restarting", "lost", "checkpoints", "fewer"), strict=True))

Cell = str | tuple[str, str]
"""HTML, or HTML with a class."""


def write_report(study: Study, swept: Sequence[tuple[float, Study]], *, name: str = "") -> str:
    """Return the page of a study and of its sweep; `name` is what the machine is called."""
    assumptions = study.assumptions
    chips = f"{assumptions.mesh.size:,} chips"
    called = name or f"A {assumptions.mesh} mesh"
    words = {
        "title": f"What failures cost: {html.escape(called)}",
        "subtitle": html.escape(
            f"{assumptions.mesh} mesh of {chips}, {study.days:g} days simulated {study.runs} times"
        ),
        "lead": _lead(study),
        "machine": _machine(study),
        "bars": _bars(study),
        "key": _key(),
        "policies": _policies(study),
        "answers_note": (
            "Goodput: work that was kept, relative to a machine that never fails or saves. ±: 95 % interval over the "
            "runs, in each of which all policies face the same failures. Worth: chip time won against quick repair at "
            "the price of a chip-hour, less what spares and crew cost."
        ),
        "failure": _failure(study),
        "failure_note": (
            "All time that is not goodput, checkpoints apart, divided by the failures that stopped the job; chip-hours "
            "at the price of a chip-hour."
        ),
        "sweep": _sweep(swept),
        "sweep_note": "Goodput in % with every mean time between failures scaled. Read it at your own machine's rate.",
        "assumptions": _assumptions(assumptions),
        "checks": _checks(study),
        "made": f"Made by meshmend lab availability; seed {study.seed}. The same options give the same page.",
    }
    text = (files("meshmend_lab.availability") / "report.html").read_text(encoding="utf-8")
    # In one pass: braces in a name are not places to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: words[found[1]], text)


def _lead(study: Study) -> str:
    """Say which policy keeps most work and which is cheapest, and whether the runs tell them apart."""
    best = max(study.outcomes, key=lambda outcome: outcome.goodput.mean)
    cheapest = min(study.outcomes, key=lambda outcome: outcome.cost.mean)
    others = [outcome for outcome in study.outcomes if outcome is not best]
    close = [one.name for one in others if _overlap(one.goodput, best.goodput)]
    said = f"Most work is kept by <b>{best.name}</b>: {_percent(best.goodput)} goodput"
    if close:
        *others_close, last = close
        listed = f"{', '.join(others_close)} and {last}" if others_close else last
        said += f", too close to {listed} to tell them apart with {study.runs} runs"
    if best is cheapest:
        return f"{said}. That is also the cheapest, at {_money(cheapest.cost.mean, 3)} per useful chip-hour."
    return (
        f"{said}. Cheapest is <b>{cheapest.name}</b>, at {_money(cheapest.cost.mean, 3)} per useful chip-hour "
        f"against {_money(best.cost.mean, 3)}, with {_percent(cheapest.goodput)} goodput."
    )


def _overlap(a: Estimate, b: Estimate) -> bool:
    return not abs(a.mean - b.mean) > math.hypot(a.half_width, b.half_width)


def _machine(study: Study) -> str:
    assumptions, hardware = study.assumptions, study.assumptions.hardware
    rate = assumptions.failures_per_h
    step = assumptions.compute_s + study.all_reduce_s
    rows: list[tuple[Cell, ...]] = [
        ("chips", f"{html.escape(str(assumptions.mesh))}: {assumptions.mesh.size:,}"),
        ("parts that fail", ", ".join(f"{assumptions.parts(one):,} {one.name}s" for one in assumptions.levels)),
        ("a failure", f"every {1 / rate:,.1f} h: {rate * HOURS:,.0f} per year" if rate else "never"),
        ("network", f"{html.escape(hardware.name)}, {name_rate(hardware.link_bytes_per_s)} per link and direction"),
        (
            "a training step",
            f"{name_seconds(step)}, of which the all-reduce of {name_payload(assumptions)} takes "
            f"{name_seconds(study.all_reduce_s)} (predicted)",
        ),
        (
            "price",
            f"{_money(assumptions.price)} per chip-hour, "
            f"{_whole(assumptions.price * assumptions.mesh.size * HOURS)} per year",
        ),
    ]
    return _table((), rows)


def _policies(study: Study) -> str:
    best = max(outcome.goodput.mean for outcome in study.outcomes)
    first = _worth(study, study.outcomes[0])
    rows = []
    for outcome in study.outcomes:
        gain = "" if outcome is study.outcomes[0] else _percent(outcome.gain, "+")
        worth = "" if outcome is study.outcomes[0] else _whole(_worth(study, outcome) - first, "+")
        stops = f"{outcome.interruptions_per_year.mean:.0f} + {outcome.regrowths_per_year.mean:.0f}"
        cells: tuple[Cell, ...] = (
            f"{outcome.name}<br><small>{DOES[outcome.name]}</small>",
            *((text, "n") for text in (_percent(outcome.goodput), gain, worth, _money(outcome.cost.mean, 3))),
            *((text, "n") for text in (f"{outcome.downtime:.1%}".replace("%", " %"), stops)),
        )
        rows.append((cells, "best" if outcome.goodput.mean == best else ""))
    heads: tuple[Cell, ...] = (
        "policy",
        *((text, "n") for text in ("goodput", "over quick repair", "worth per year", "$ per useful chip-hour")),
        ("without training", "n"),
        ("stops per year: failures + regrowths", "n"),
    )
    return _table(heads, [cells for cells, _ in rows], [look for _, look in rows])


def _worth(study: Study, outcome: Outcome) -> float:
    """Return the value of a year's work less what is paid for it."""
    earned = outcome.goodput.mean * study.assumptions.mesh.size * study.assumptions.price
    return (earned - outcome.price_h) * HOURS


def _failure(study: Study) -> str:
    rows: list[tuple[Cell, ...]] = []
    for outcome in study.outcomes:
        stops = outcome.interruptions_per_year.mean
        lost = 1 - outcome.goodput.mean - outcome.losses["checkpoints"].mean
        if stops:
            hours = lost * HOURS / stops
            chip_hours = hours * study.assumptions.mesh.size
            texts = (
                f"{stops:,.0f}",
                f"{hours:.2f} h",
                f"{chip_hours:,.0f}",
                _whole(chip_hours * study.assumptions.price),
            )
        else:
            texts = ("0", "–", "–", "–")
        rows.append((outcome.name, *((text, "n") for text in texts)))
    heads = (
        "failures that stop the job, per year",
        "machine time lost per failure",
        "chip-hours",
        "price of one failure",
    )
    return _table(("policy", *((text, "n") for text in heads)), rows)


def _sweep(swept: Sequence[tuple[float, Study]]) -> str:
    if not swept or not swept[0][1].assumptions.failures_per_h:
        return "<p>Nothing fails.</p>"
    heads: tuple[Cell, ...] = (
        "a failure of the machine every",
        *((outcome.name, "n") for outcome in swept[0][1].outcomes),
    )
    rows: list[tuple[Cell, ...]] = []
    for factor, study in swept:
        best = max(outcome.goodput.mean for outcome in study.outcomes)
        hours = f"{1 / study.assumptions.failures_per_h:,.1f} h ({factor:g} ×)"
        cells = [(_percent(one.goodput), one.goodput.mean == best) for one in study.outcomes]
        rows.append((hours, *((f"<b>{text}</b>" if is_best else text, "n") for text, is_best in cells)))
    return _table(heads, rows)


def _assumptions(assumptions: Assumptions) -> str:
    values = {name: about.write(getattr(assumptions, name)) for name, about in TABLE.items()}
    rows: list[tuple[Cell, ...]] = [
        (about.what, (html.escape(values[name]), "n"), f"<code>--assume {name}</code>", _small(about.source))
        for name, about in TABLE.items()
        if assumptions.board is not None or not name.endswith("_board_h")
    ]
    network = html.escape(assumptions.hardware.name)
    rows.append(("network", (network, "n"), "<code>--hardware</code>", _small(SOURCES["hardware"])))
    return _table(("what", ("value", "n"), "option", "source of the default"), rows)


def _small(text: str) -> str:
    return f"<small>{html.escape(text)}</small>"


def _checks(study: Study) -> str:
    if not study.checks:
        return ""
    worst = 100 * max(abs(check.error) for check in study.checks)
    n = len(study.checks)
    return f"On the {n} states with the most holes, the estimated step is off by at most {worst:.2f} %."


def _bars(study: Study) -> str:
    """Draw a bar per policy, from nought to the whole time: goodput, and where the rest went."""
    right, height = 400, 46

    def x(share: float) -> float:
        return right * share

    parts = []
    for row, outcome in enumerate(study.outcomes):
        y = 20 + row * height
        goodput = outcome.goodput
        parts.append(f'<text x="0" y="{y - 5}">{outcome.name}</text>')
        parts.append(f'<text class="soft" x="{right}" y="{y - 5}" text-anchor="end">{100 * goodput.mean:.1f} %</text>')
        at = goodput.mean
        parts.append(_bar("good", 0.0, x(at), y))
        for cause in reversed(LOSSES):
            parts.append(_bar(_LOOKS[cause], x(at), x(at + outcome.losses[cause].mean), y))
            at += outcome.losses[cause].mean
        if math.isfinite(goodput.half_width):
            ends = x(max(0.0, goodput.mean - goodput.half_width)), x(min(1.0, goodput.mean + goodput.half_width))
            parts.append(f'<line class="whisker" x1="{ends[0]:.1f}" y1="{y + 11}" x2="{ends[1]:.1f}" y2="{y + 11}"/>')
    foot = 20 + len(study.outcomes) * height
    for share, anchor in ((0.0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1.0, "end")):
        parts.append(f'<text class="soft" x="{x(share):g}" y="{foot}" text-anchor="{anchor}">{100 * share:g} %</text>')
    said = ", ".join(f"{outcome.name} {_percent(outcome.goodput)}" for outcome in study.outcomes)
    return (
        f'<svg class="bars" viewBox="0 0 {right} {foot + 6}" role="img" aria-label="Goodput: {said}">'
        f"{''.join(parts)}</svg>"
    )


def _bar(look: str, start: float, end: float, y: float) -> str:
    return f'<rect class="{look}" x="{start:.1f}" y="{y}" width="{max(0.0, end - start):.1f}" height="22"/>'


def _key() -> str:
    looks = {"goodput": "good", **{cause: _LOOKS[cause] for cause in reversed(LOSSES)}}
    square = '<svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{}" width="10" height="10"/></svg>'
    return f'<ul class="key">{"".join(f"<li>{square.format(look)}{name}</li>" for name, look in looks.items())}</ul>'


def _table(heads: Iterable[Cell], rows: Sequence[tuple[Cell, ...]], looks: Sequence[str] = ()) -> str:
    def cell(tag: str, one: Cell) -> str:
        text, look = one if isinstance(one, tuple) else (one, "")
        return f'<{tag} class="{look}">{text}</{tag}>' if look else f"<{tag}>{text}</{tag}>"

    head = "".join(cell("th", one) for one in heads)
    body = "".join(
        f'<tr class="{look}">{"".join(cell("td", one) for one in row)}</tr>'
        for row, look in zip(rows, looks or [""] * len(rows), strict=True)
    )
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def _percent(estimate: Estimate, sign: str = "") -> str:
    half = f" ± {100 * estimate.half_width:.2f}" if math.isfinite(estimate.half_width) else ""
    return f"{100 * estimate.mean:{sign}.2f}{half} %".replace("-", "−")


def _money(value: float, digits: int = 2) -> str:
    return f"${value:,.{digits}f}" if math.isfinite(value) else "–"


def _whole(value: float, sign: str = "") -> str:
    """Return an amount to three digits, with its sign before the currency's."""
    before = "−" if value < 0 else "+" if sign else ""
    digits = max(0, len(f"{abs(value):.0f}") - 3)
    return f"{before}${round(abs(value), -digits):,.0f}"
