"""Rates from a log, against arithmetic, SciPy's own distributions, and machines whose rates are known."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from commandline import run, run_json
from meshmend.availability import Assumptions, simulate
from meshmend.availability.history import draw
from meshmend.availability.log import Duration, read_log
from meshmend.errors import ParameterError

BY_HAND = """time,host,chip,event
2026-01-01T00:00:00Z,,,begin
2026-01-02T00:00:00Z,h3,,failed
2026-01-02T12:00:00Z,h3,,repaired
2026-01-05T00:00:00+02:00,,c7,failed
2026-01-06 10:00,h1,,failed
2026-01-07T00:00:00Z,h1,,repaired
2026-01-11T00:00:00Z,,,end
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "failures.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_by_hand(tmp_path: Path) -> None:
    """Ten days of 8 hosts and 64 chips: two failures of hosts for 12 and 14 h, one of a chip that is still down."""
    log = read_log(written(tmp_path, BY_HAND))
    assert (log.hours, log.n_failures) == (240, 3)
    host, chip = log.rates({"host": 8, "chip": 64})
    assert (host.failures.count, host.failures.mean_h) == pytest.approx((2, (8 * 240 - 26) / 2))
    assert (host.repairs.count, host.repairs.mean_h) == pytest.approx((2, 13))
    # Down from 22:00 on the 4th, UTC, to the end: 146 h, which are not over.
    assert (chip.failures.count, chip.failures.mean_h) == pytest.approx((1, 64 * 240 - 146))
    assert (chip.repairs.count, chip.repairs.mean_h) == (0, math.inf)
    assumed = Assumptions.of("8x8").with_rates([host, chip], "mine")
    assert [(one.name, one.mtbf_h, one.repair_h) for one in assumed.levels] == [
        ("host", pytest.approx(947), pytest.approx(13)),
        ("board", math.inf, 24.0),
        ("chip", pytest.approx(15214), 24.0),
    ]


@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_intervals_are_those_of_chi_square(count: int) -> None:
    low, high = Duration(1000.0, count).interval_h
    assert low == pytest.approx(2 * 1000 / stats.chi2.ppf(0.975, 2 * count + 2))
    assert high == (pytest.approx(2 * 1000 / stats.chi2.ppf(0.025, 2 * count)) if count else math.inf)


def drawn(folder: Path, machine: Assumptions, hours: float, seed: int) -> Path:
    """Write the log of a machine whose rates are known, as its operator would."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [(0.0, "begin", -1), (hours, "end", -1)]
    until: dict[int, float] = {}
    for failure in draw(machine, hours, seed, 0):
        if failure.at_h < until.get(failure.part, 0.0):
            continue
        back = failure.at_h + failure.repair_factor * machine.levels[0].repair_h
        until[failure.part] = back
        rows.append((failure.at_h, "failed", failure.part))
        if back < hours:
            rows.append((back, "repaired", failure.part))
    lines = [
        f"{(start + timedelta(hours=at)).isoformat()},{'' if part < 0 else part},{event}" for at, event, part in rows
    ]
    return written(folder, "time,host,event\n" + "\n".join(lines))  # in no order: rows are sorted by time


def test_intervals_hold_the_truth_about_as_often_as_they_say(tmp_path: Path) -> None:
    machine = Assumptions.of("16x16", mtbf_host_h=500, repair_host_h=20, mtbf_chip_h=math.inf, mtbf_board_h=math.inf)
    held = np.zeros(2)
    for seed in range(60):
        (rates,) = read_log(drawn(tmp_path, machine, 720, seed)).rates({"host": 32})
        for number, (one, truth) in enumerate(((rates.failures, 500), (rates.repairs, 20))):
            low, high = one.interval_h
            held[number] += low < truth < high
    # 57 of 60 on average; fewer than 51 has a chance of 1 in 500.
    assert (held >= 51).all()


SMALL = ("8x8", "--days", "30", "--runs", "2", "--assume", "payload_bytes=1MB", "--checks", "0")


def test_a_study_with_the_rates_of_a_log(tmp_path: Path) -> None:
    path = str(written(tmp_path, BY_HAND))
    facts = run_json("availability", *SMALL, "--log", path)
    levels = {one["name"]: one["mtbf_h"] for one in facts["assumptions"]["levels"]}
    assert levels == {"host": pytest.approx(947), "board": None, "chip": pytest.approx(15214)}
    assert facts["assumptions"]["rates_from"] == "failures.csv: 3 failures in 10.0 days"
    host, chip = facts["log"]["rates"]
    assert host["mtbf"]["interval_95_h"] == pytest.approx(list(Duration(1894, 2).interval_h))
    assert (chip["repair"]["mean_h"], chip["repair"]["count"]) == (None, 0)
    # The same study as with the rates given by hand.
    given = Assumptions.of(
        "8x8",
        payload_bytes=1e6,
        mtbf_host_h=947,
        repair_host_h=13,
        mtbf_chip_h=15214,
        mtbf_board_h=math.inf,
    )
    study = simulate(given, days=30, runs=2, checks=0)
    got = [one["goodput"]["mean"] for one in facts["policies"]]
    assert got == pytest.approx([one.goodput.mean for one in study.outcomes], rel=1e-6)


def test_people_see_the_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log and the table of docs/availability.md, as they stand."""
    page = (Path(__file__).parents[2] / "docs" / "availability.md").read_text(encoding="utf-8")
    table, log = re.findall(r"```text\n((?:failures\.csv|time,).*?)```", page, re.S)
    assert log == BY_HAND
    written(tmp_path, BY_HAND)
    monkeypatch.chdir(tmp_path)
    assert run("availability", *SMALL, "--log", "failures.csv", width=100).startswith(table)
    shown = run("availability", *SMALL, "--log", written(tmp_path, BY_HAND), width=100)
    assert "3 failures, 2026-01-01 to 2026-01-11, 10.0 days" in shown.replace("\n", " ")
    (line,) = (line for line in shown.splitlines() if line.startswith("host "))
    assert line.split() == ["host", "8", "2", "947", "262", "to", "7,820", "2", "13.0", "3.6", "to", "107"]
    assert "No repair of a kind of part" in shown
    # Twice as many chips fail half as often.
    facts = run_json("availability", *SMALL, "--log", tmp_path / "failures.csv", "--log-chips", "128")
    assert facts["log"]["rates"][0]["mtbf"]["mean_h"] == pytest.approx((16 * 240 - 26) / 2)


def test_the_report_says_where_its_rates_come_from(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    run("availability", *SMALL, "--log", str(written(tmp_path, BY_HAND)), "-o", str(page))
    assert "failures.csv: 3 failures in 10.0 days" in page.read_text(encoding="utf-8")


HEAD = "time,host,event\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected the columns time, event, and at least one of host, board, chip; got nothing"),
        ("when,host\n", "line 1: expected the columns time, event.*got when, host"),
        (HEAD + "2026-01-01,h1,failed\nyesterday,h1,repaired\n", "line 3: the time is 'yesterday', expected ISO 8601"),
        (HEAD + "2026-01-01,h1,broken\n", "line 2: the event is 'broken', expected one of: failed, repaired"),
        (HEAD + "2026-01-01,,failed\n", "line 2: expected the part's name in one of the columns host; got 0 names"),
        ("time,host,chip,event\n2026-01-01,a,b,failed\n", "line 2: expected the part's name.*got 2 names"),
        (HEAD + "2026-01-01,a,failed\n\n2026-01-02,a,failed\n", "line 4: host 'a' failed, but it is down since line 2"),
        (HEAD + "2026-01-01,a,repaired\n2026-01-02,b,failed\n", "line 2: host 'a' was repaired, but no row before"),
        (HEAD + "2026-01-01,a,begin\n2026-01-02,,end\n", "no row with the event 'failed'"),
        (HEAD + "2026-01-01,a,failed\n", "covers no time. Add rows with the events 'begin' and 'end'"),
        (HEAD + "2026-01-01,a,failed\n2026-01-02,,begin\n", "line 3: the log begins at 2026-01-02.*after its row"),
        (HEAD + "2026-01-02,a,failed\n2026-01-01,,end\n", "line 3: the log ends at 2026-01-01.*before its row"),
    ],
)
def test_mistakes_name_the_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=message):
        read_log(written(tmp_path, text))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--log", "none.csv"), "none.csv cannot be read"),
        (("--log-chips", "8"), "--log-chips goes with --log"),
        (("--log", "LOG", "--assume", "mtbf_host_h=300"), "--assume mtbf_host_h and --log both give a rate"),
        (("--log", "LOG", "--log-chips", "12"), "--log-chips 12: 8 chips per host do not divide them"),
        (("--log", "LOG", "--log-chips", "8"), "names 2 hosts that failed, but it is about 1"),
    ],
)
def test_mistakes_are_reported(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    path = str(written(tmp_path, BY_HAND))
    given = [path if word == "LOG" else word for word in words]
    assert message in " ".join(run("availability", *SMALL, *given, code=1).split())
