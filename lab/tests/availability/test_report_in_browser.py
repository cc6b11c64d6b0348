"""The page of `meshmend lab availability -o` as a reader sees it, in Chromium: wide and narrow, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium import webdriver

from chromium import read_log, requests
from meshmend_lab.availability import Assumptions, simulate
from meshmend_lab.availability.report import write_report
from site_pages import CONTRAST, NARROW, TOO_WIDE, WIDE, browser, show

__all__ = ["browser"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "scheme"), [(size, scheme) for size in (WIDE, NARROW) for scheme in ("light", "dark")]
)
def test_a_report_can_be_read(size: tuple[int, int], scheme: str, tmp_path: Path, browser: webdriver.Chrome) -> None:
    study = simulate(Assumptions.of("8x8", payload_bytes=1e6), days=30, runs=2, checks=1)
    path = tmp_path / "report.html"
    path.write_text(write_report(study, [(1.0, study)], name="A machine"), encoding="utf-8")
    show(browser, path.as_uri(), size, scheme)
    assert browser.execute_script("return getComputedStyle(document.documentElement).colorScheme") == "light dark"
    assert browser.execute_script(CONTRAST) == []
    assert browser.execute_script(TOO_WIDE) == []
    assert read_log(browser, "browser") == []
    assert [url for url in requests(browser) if not url.startswith(("file:", "data:"))] == []
