"""`meshmend lab availability -o report.html`: one page, for the decision-maker."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from commandline import run, run_json
from meshmend_lab.availability import POLICIES, Assumptions, simulate
from meshmend_lab.availability.assumptions import SOURCES, TABLE
from meshmend_lab.availability.report import DOES, write_report

SMALL = ("8x8", "--days", "60", "--runs", "3", "--assume", "payload_bytes=1MB,price=3,crew_price=40")
HOSTILE = "<script>alert(1)</script>\"><img src=x onerror='alert(2)'>&{{lead}}"
VOID = {"meta", "link", "br", "rect", "line"}


class Page(HTMLParser):
    """What a page says, and what it is made of; raises AssertionError where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def row(self, begins: str, length: int) -> list[str]:
        (found,) = (row for row in self.rows if row[0].startswith(begins) and len(row) == length)
        return found


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("facts") / "report.html"
    found = run_json("lab", "availability", *SMALL, "-o", path)
    assert path.is_file()
    assert found == run_json("lab", "availability", *SMALL)
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert f"Written to {path}" in run("lab", "availability", *SMALL, "--name", HOSTILE, "--output", str(path)).replace(
        "\n", ""
    )
    return Page(path.read_text(encoding="utf-8"))


def test_it_has_what_availability_says(page: Page, facts: Any) -> None:
    """The same options give the same study."""
    first = facts["policies"][0]
    for one in facts["policies"]:
        row = page.row(one["policy"], 7)
        goodput, cost = one["goodput"], one["cost_per_useful_chip_hour"]["mean"]
        assert row[1] == f"{100 * goodput['mean']:.2f} ± {100 * goodput['half_width_95']:.2f} %"
        assert row[4] == f"${cost:.3f}"
        assert DOES[one["policy"]] in row[0]
        # What a year is worth, by hand: 64 chips at $3, 16 more of two spare hosts or 128 of two cubes, a crew at $40.
        spares = {"hot spares": 16, "optical cubes": 128}.get(one["policy"], 0)
        paid_h = 3 * (64 + spares) + 40 * (one is first)
        value = (3 * 64 * goodput["mean"] - paid_h) * 8760
        if one is first:
            start = value
            assert row[3] == ""
        else:
            said = float(row[3].replace("$", "").replace(",", "").replace("−", "-"))
            assert said == pytest.approx(value - start, rel=0.006)


def test_bars_are_as_long_as_what_they_stand_for(page: Page, facts: Any) -> None:
    """From nought: a bar of twice the length is twice the goodput."""
    bars = [a for tag, a in page.tags if tag == "rect" and a.get("class") == "good" and a.get("x")]
    assert [float(bar["x"] or 1) for bar in bars] == [0.0] * len(facts["policies"])
    for bar, one in zip(bars, facts["policies"], strict=True):
        assert float(bar["width"] or 0) / 400 == pytest.approx(one["goodput"]["mean"], abs=2e-4)


def test_what_a_failure_costs(page: Page, facts: Any) -> None:
    for one in facts["policies"]:
        stops = one["interruptions_per_year"]["mean"]
        lost = sum(share["mean"] for cause, share in one["losses"].items() if cause != "checkpoints")
        hours = lost * 8760 / stops
        row = page.row(one["policy"], 5)
        assert row[1] == f"{stops:,.0f}"
        assert row[2] == f"{hours:.2f} h"
        assert float(row[4].strip("$").replace(",", "")) == pytest.approx(hours * 64 * 3, rel=0.006)


def test_every_assumption_is_there_with_its_option_and_source(page: Page) -> None:
    options = [row[2] for row in page.rows if len(row) == 4 and row[2].startswith("--")]
    assert options == [*(f"--assume {name}" for name in TABLE), "--hardware"]
    assert page.row("price of a chip-hour", 4)[1] == "$3.00"
    said = " ".join(page.words)
    for source in SOURCES.values():
        assert source in said


def test_the_sweep_has_every_policy_at_every_rate(page: Page) -> None:
    rows = [row for row in page.rows if "×)" in row[0]]
    assert [re.findall(r"\(([\d.]+) ×\)", row[0])[0] for row in rows] == ["0.25", "0.5", "1", "2", "4"]
    assert all(len(row) == 1 + len(POLICIES) for row in rows)


def test_it_needs_nothing_else_and_a_hostile_name_stays_a_name(page: Page) -> None:
    assert any(HOSTILE in words for words in page.words)
    assert not {tag for tag, _ in page.tags} & {"script", "img", "iframe", "object"}
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") or name == "src" for name in attributes), tag
        assert (attributes.get("href") or "data:").startswith("data:")
    (policy,) = [attributes["content"] for tag, attributes in page.tags if tag == "meta" and "http-equiv" in attributes]
    assert "default-src 'none'" in str(policy)


def test_a_machine_that_never_fails() -> None:
    study = simulate(
        Assumptions.of("4x4", board=None, mtbf_chip_h=float("inf"), mtbf_host_h=float("inf")), days=5, runs=1, checks=0
    )
    shown = Page(write_report(study, []))
    assert ["a failure", "never"] in shown.rows
    assert "Nothing fails." in shown.words
    assert shown.row("quick repair", 5)[1:] == ["0", "–", "–", "–"]


def test_a_tie_is_called_a_tie() -> None:
    study = simulate(Assumptions.of("8x8", payload_bytes=1e6), days=30, runs=2, checks=0)
    assert "too close to" in write_report(study, [])
