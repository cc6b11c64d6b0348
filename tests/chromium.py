"""A headless Chromium for tests of pages, which writes down what pages log and request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1300,950",
]


@contextmanager
def open_chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """Start a browser with a profile of its own; where there is none, the test is skipped."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=Service(driver)) as chrome:
        yield chrome


def read_log(browser: webdriver.Chrome, name: str) -> list[dict[str, Any]]:
    """Return what a log of the browser has got since it was read last."""
    return list(browser.get_log(name))  # type: ignore[no-untyped-call]


def requests(browser: webdriver.Chrome) -> list[str]:
    """Return the address of every request since the log was read last."""
    messages = (json.loads(entry["message"])["message"] for entry in read_log(browser, "performance"))
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
