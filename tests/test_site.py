"""The site as a reader sees it, in Chromium: wide and narrow, light and dark. The site is built, and
served on loopback.

These take about a minute, so they are slow tests. `python tests/test_site.py FOLDER` writes a screenshot of every
view.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from selenium import webdriver

from chromium import read_log, requests
from site_pages import CONTRAST, NARROW, TOO_WIDE, WIDE, browser, browsing, show

__all__ = ["browser"]

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = ("", "start/", "jobs/", "availability/", "measured/", "cli/")
VIEWS = [(page, size, scheme) for page in PAGES for size in (WIDE, NARROW) for scheme in ("light", "dark")]

WITHOUT_WORDS = "return [...document.images].filter(i => !i.alt.trim()).map(i => i.src)"


class Quiet(SimpleHTTPRequestHandler):
    """A server that writes no log."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Build the site into a folder, and serve it on loopback."""
    environment = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("site")) as address:
        yield address


@pytest.mark.parametrize(("page", "size", "scheme"), VIEWS, ids=lambda value: str(value))
def test_a_page_can_be_read(
    page: str, size: tuple[int, int], scheme: str, site: str, browser: webdriver.Chrome
) -> None:
    show(browser, site + page, size, scheme)
    assert (
        browser.execute_script("return document.body.dataset.mdColorScheme")
        == {"light": "default", "dark": "slate"}[scheme]
    )
    assert browser.execute_script(CONTRAST) == []
    assert browser.execute_script(WITHOUT_WORDS) == []
    assert browser.execute_script(TOO_WIDE) == []
    assert read_log(browser, "browser") == []
    sent = requests(browser)
    assert any(url.startswith(site) for url in sent)
    assert [url for url in sent if not url.startswith((site, "data:", "blob:"))] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_has_everything(scheme: str, site: str, browser: webdriver.Chrome) -> None:
    show(browser, site, WIDE, scheme)
    for what in (".mm-film img", ".mm-words h1", ".mm-words .highlight", ".mm-code .highlight"):
        box = browser.execute_script(f"return document.querySelector('{what}').getBoundingClientRect().toJSON()")
        assert box["width"] > 100, what
        assert box["bottom"] <= WIDE[1], what


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with (
        TemporaryDirectory() as built,
        TemporaryDirectory() as profile,
        served(Path(built)) as home,
        browsing(Path(profile)) as chrome,
    ):
        for page, size, scheme in VIEWS:
            show(chrome, home + page, size, scheme)
            picture = chrome.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
            name = f"{page.strip('/') or 'home'}-{size[0]}-{scheme}.png"
            (folder / name).write_bytes(base64.b64decode(picture))
