"""What `meshmend bench overhead` makes of its measurements, and what it measures."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from meshmend.bench import overhead
from meshmend.bench.overhead import Overhead, measure


def test_a_share_is_the_lines_and_a_tenth_of_a_scrape() -> None:
    found = Overhead(step_s=0.1, n_hosts=4, lines_s=50e-6, scrape_s=2e-3, groups=(0.003, 0.001, 0.002))
    assert found.share(10) == pytest.approx((50e-6 + 200e-6) / 0.1)
    assert found.share(100) == pytest.approx((50e-6 + 20e-6) / 0.1)
    assert found.paired == 0.002
    assert found.interval == (0.001, 0.003)


@pytest.mark.parametrize(("n", "first", "last"), [(6, 1, 6), (10, 2, 9), (20, 6, 15), (30, 10, 21)])
def test_the_interval_of_a_median_is_that_of_the_tables(n: int, first: int, last: int) -> None:
    """Ranks for 95 % as in tables of the sign test."""
    found = Overhead(step_s=0.1, n_hosts=1, lines_s=0.0, scrape_s=0.0, groups=tuple(float(i) for i in range(n, 0, -1)))
    assert found.interval == (first, last)


def test_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "WARM_STEPS", 20)
    monkeypatch.setattr(overhead, "STEP_S", 0.002)
    monkeypatch.setattr(overhead, "BATCH", 100)
    found = measure(n_hosts=2, n_groups=2, n_batches=2, n_scrapes=2)
    assert 0 < found.lines_s < found.scrape_s
    assert found.step_s > 0
    assert len(found.groups) == 2
    facts = found.facts()
    assert facts["lines"] < facts["scraped_every_ten_seconds"] < facts["scraped_each_second"]


@pytest.mark.slow
def test_timeline_and_metrics_take_less_than_half_a_percent_of_a_step() -> None:
    """As examples/operate has it scraped. CPU time is inflated on a busy machine; scraped each second it is close."""
    assert measure(n_groups=2).share(100) < 0.005
