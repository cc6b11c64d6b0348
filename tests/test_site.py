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

from chromium import open_chromium, read_log, requests

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = ("", "start/", "jobs/", "availability/", "measured/", "cli/")
WIDE, NARROW = (1280, 800), (390, 844)
VIEWS = [(page, size, scheme) for page in PAGES for size in (WIDE, NARROW) for scheme in ("light", "dark")]

# The contrast of every run of text with what is behind it, as WCAG 2 defines it: the colours of all ancestors are laid
# over each other, opacity included. Returns the texts below the limit.
CONTRAST = """
const rgba = text => { const n = text.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
const luminance = colour => {
  const [r, g, b] = colour.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = new Map();
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const element = node.parentElement;
  if (!node.textContent.trim() || element.closest("svg, script, style, noscript, template")) continue;
  if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  if (![...range.getClientRects()].some(box => box.width > 1 && box.height > 1)) continue;
  const chain = [];
  for (let each = element; each; each = each.parentElement) chain.unshift(getComputedStyle(each));
  let behind = [255, 255, 255], opacity = 1;
  for (const style of chain) {
    opacity *= Number(style.opacity);
    const colour = rgba(style.backgroundColor);
    behind = over([...colour.slice(0, 3), colour[3] * opacity], behind);
  }
  const colour = rgba(chain.at(-1).color);
  const front = over([...colour.slice(0, 3), colour[3] * opacity], behind);
  const [dark, light] = [luminance(front), luminance(behind)].sort((a, b) => a - b);
  const ratio = (light + 0.05) / (dark + 0.05);
  const words = node.textContent.trim().slice(0, 40);
  if (ratio < 4.5) found.set(`${words} <${element.tagName} ${element.className}>`, ratio);
}
return [...found].map(([text, ratio]) => `${ratio.toFixed(2)}: ${text}`);
"""
WITHOUT_WORDS = "return [...document.images].filter(i => !i.alt.trim()).map(i => i.src)"
TOO_WIDE = """
const width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth <= width) return [];
return [...document.body.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > width + 1)
  .map(e => `${e.tagName} ${e.className}`).slice(0, 8);
"""


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


@contextmanager
def browsing(profile: Path) -> Iterator[webdriver.Chrome]:
    with open_chromium(profile) as chrome:
        # Every visit is a first one: the theme would remember the scheme of the last.
        first = {"source": "try { localStorage.clear(); } catch {}"}
        chrome.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", first)
        yield chrome


def show(browser: webdriver.Chrome, address: str, size: tuple[int, int], scheme: str) -> None:
    """Open a page as a reader whose system has this screen and this colour scheme, and who wants no motion."""
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == NARROW}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.execute_cdp_cmd("Network.setCacheDisabled", {"cacheDisabled": True})
    browser.get("about:blank")
    for log in ("browser", "performance"):
        read_log(browser, log)
    browser.get(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("site")) as address:
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with browsing(tmp_path_factory.mktemp("profile")) as chrome:
        yield chrome


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
