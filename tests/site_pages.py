"""Pages in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver

from chromium import open_chromium, read_log

WIDE, NARROW = (1280, 800), (390, 844)


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


TOO_WIDE = """
const width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth <= width) return [];
return [...document.body.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > width + 1)
  .map(e => `${e.tagName} ${e.className}`).slice(0, 8);
"""


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
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with browsing(tmp_path_factory.mktemp("profile")) as chrome:
        yield chrome
