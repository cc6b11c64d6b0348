"""The studio in headless Chromium, by what a visitor sees, clicks and types."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select

import meshmend as mm
from chromium import open_chromium, read_log, requests
from meshmend.cost.units import name_seconds

PATIENCE_S = 120
BASE = "shape=4x4&hardware=tpu-v6e&payload=1MB"
# Every element that shows text of its own, with its colour and what it stands on.
CONTRASTS = """
const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const numbers = text => text.match(/[\\d.]+/g).map(Number);
const ground = node => {
  for (; node; node = node.parentElement) {
    const colour = numbers(getComputedStyle(node).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
};
const found = [];
for (const node of document.querySelectorAll("body *")) {
  const texts = [...node.childNodes].filter(child => child.nodeType === 3 && child.textContent.trim());
  const says = texts.length ? texts[0].textContent.trim() : node.matches("input, select") ? node.value : "";
  if (!says || !node.getClientRects().length || node.closest(".unseen, noscript, option, [type=range]")) continue;
  const style = getComputedStyle(node), isSvg = node instanceof SVGElement, chip = node.closest(".chip");
  const front = numbers(isSvg ? style.fill : style.color);
  const behind = isSvg ? node.ownerSVGElement.parentElement : node;
  const back = chip ? numbers(getComputedStyle(chip.querySelector("rect")).fill) : ground(behind);
  const [light, dark] = [luminance(front), luminance(back)].sort((a, b) => b - a);
  found.push([(light + 0.05) / (dark + 0.05), node.tagName + "#" + node.id, says.slice(0, 30)]);
}
return found;
"""
WIDE = """
const isWide = node => node.getBoundingClientRect().right > 391 && !node.closest(".unseen, svg");
return [...document.querySelectorAll("body *")].filter(isWide).map(node => node.tagName + "#" + node.id);
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    words = [sys.executable, "-m", "meshmend", "lab", "studio", "4x4", "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as studio:
        try:
            assert studio.stdout is not None
            said = json.loads("".join(studio.stdout.readline() for _ in range(5)))
            yield f"http://{said['address']}:{said['port']}/"
        finally:
            studio.terminate()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with open_chromium(tmp_path_factory.mktemp("profile")) as chrome:
        yield chrome


class Studio:
    """The page, by what a visitor can see and touch."""

    def __init__(self, browser: webdriver.Chrome, address: str) -> None:
        self.browser, self.address = browser, address

    def open(self, fragment: str = BASE) -> None:
        self.browser.get("about:blank")
        self.browser.get(f"{self.address}#{fragment}")
        self.wait()

    def until(self, happens: Callable[[], Any]) -> Any:
        ends = time.monotonic() + PATIENCE_S
        while not (found := happens()):
            assert time.monotonic() < ends, f"it did not happen in {PATIENCE_S} s"
            time.sleep(0.05)
        return found

    def run(self, script: str) -> Any:
        return self.browser.execute_script(script)

    def wait(self, what: str = "answered") -> None:
        """Wait until the state that is in the address has been answered."""
        self.until(lambda: self.run(f"return document.body.dataset.{what} === location.hash.slice(1)"))

    def find(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, name: str) -> str:
        return self.find(f"#{name}").text

    def chip(self, name: str) -> WebElement:
        return self.find(f".chip[data-name='{name}']")

    def click_cable(self, name: str) -> None:
        """Click in the middle of a cable, where no chip lies on it."""
        box = self.run(
            f"const b = document.querySelector(\".cable[data-name='{name}'] .hit\").getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]"
        )
        actions = ActionChains(self.browser)
        actions.w3c_actions.pointer_action.move_to_location(*map(round, box))  # type: ignore[no-untyped-call]
        actions.click().perform()
        self.wait()

    def press(self, *keys: str) -> None:
        ActionChains(self.browser).send_keys(*keys).perform()

    @property
    def fragment(self) -> str:
        return str(self.run("return location.hash.slice(1)"))

    @property
    def failed(self) -> set[str]:
        return set(self.run("return [...document.querySelectorAll('.chip.failed')].map(n => n.dataset.name)"))

    @property
    def focused(self) -> str | None:
        name = self.run("return document.activeElement.dataset.name ?? null")
        return None if name is None else str(name)


@pytest.fixture
def studio(browser: webdriver.Chrome, address: str) -> Iterator[Studio]:
    """A page that stays quiet: nothing on its console, and no request but to its own server."""
    browser.get("about:blank")
    for log in ("browser", "performance"):
        read_log(browser, log)
    yield Studio(browser, address)
    assert read_log(browser, "browser") == []
    for url in requests(browser):
        assert url.startswith((address, "about:", "data:", f"blob:{address}")), url


def predicted(mesh: mm.Mesh) -> str:
    schedule = mm.plan(mesh, payload_bytes=1e6, hardware="tpu-v6e", budget_s=0.5)
    return name_seconds(mm.predict(schedule, 1e6, "tpu-v6e").seconds)


def shown(studio: Studio) -> str:
    return studio.text("time").replace("\n", " ")


def told(studio: Studio) -> str:
    return re.sub(r"(?<=\d)(?=[a-zµ])", " ", shown(studio))


def test_clicks_fail_and_slow_and_a_link_keeps_it(studio: Studio) -> None:
    studio.open()
    assert told(studio) == predicted(mm.Mesh("4x4"))
    studio.chip("1,1").click()
    studio.wait()
    assert studio.failed == {"1,1"}
    assert told(studio) == predicted(mm.Mesh("4x4", failed=["1,1"]))
    studio.click_cable("3,0-3,1")
    assert studio.fragment == f"{BASE}&fail=1,1&cable-rate=3,0-3,1=1/2"
    slow = mm.Mesh("4x4", failed=["1,1"], cable_rates={"3,0-3,1": "1/2"})
    assert told(studio) == predicted(slow)
    assert "slow" in str(studio.find(".cable[data-name='3,0-3,1']").get_attribute("class"))
    link, time_shown = studio.fragment, shown(studio)

    first = studio.browser.current_window_handle
    studio.browser.switch_to.new_window("tab")
    try:
        studio.open(link)
        assert (studio.failed, shown(studio), studio.fragment) == ({"1,1"}, time_shown, link)
        assert "slow" in str(studio.find(".cable[data-name='3,0-3,1']").get_attribute("class"))
    finally:
        studio.browser.close()
        studio.browser.switch_to.window(first)

    studio.click_cable("3,0-3,1")
    assert "fail-cable=3,0-3,1" in studio.fragment
    assert told(studio) == predicted(mm.Mesh("4x4", failed=["1,1"], failed_cables=["3,0-3,1"]))
    studio.click_cable("3,0-3,1")
    assert told(studio) == predicted(mm.Mesh("4x4", failed=["1,1"]))
    studio.find("#undo").click()
    studio.wait()
    assert "fail-cable=3,0-3,1" in studio.fragment
    studio.find("#reset").click()
    studio.wait()
    assert studio.failed == set()
    assert told(studio) == predicted(mm.Mesh("4x4"))


@pytest.mark.slow
def test_boards_and_rectangles_fail_together(studio: Studio) -> None:
    studio.open()
    studio.find("[data-tool='2x2']").click()
    studio.chip("3,2").click()
    studio.wait()
    assert studio.failed == {"2,2", "2,3", "3,2", "3,3"}
    assert "fail=2x2@2,2" in studio.fragment
    studio.chip("2,3").click()
    studio.wait()
    assert studio.failed == set()
    start, end = studio.chip("0,0"), studio.chip("0,2")
    ActionChains(studio.browser).click_and_hold(start).move_to_element(end).release().perform()
    studio.wait()
    assert studio.failed == {"0,0", "0,1", "0,2"}


def test_the_keyboard_is_enough(studio: Studio) -> None:
    studio.open()
    for _ in range(30):
        if studio.focused is not None:
            break
        studio.press(Keys.TAB)
    assert studio.focused == "0,0"
    studio.press(Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert studio.focused == "2,1"
    studio.press(Keys.ENTER)
    studio.wait()
    assert studio.failed == {"2,1"}
    assert studio.chip("2,1").get_attribute("aria-pressed") == "true"
    assert studio.chip("2,1").get_attribute("aria-label") == "chip 2,1, failed"
    studio.press(Keys.ARROW_UP)
    ActionChains(studio.browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_LEFT).key_up(Keys.SHIFT).perform()
    studio.wait()
    assert "cable-rate=1,0-1,1=1/2" in studio.fragment
    studio.press("u", "u")
    studio.wait()
    assert studio.fragment == BASE


def test_survivors_in_two_groups_have_no_plan(studio: Studio) -> None:
    studio.open(f"{BASE}&fail=4x1@0,1")
    assert shown(studio) == "–"
    assert "2 disconnected groups" in studio.text("notice")


def test_a_planner_that_cannot_serve_says_why_and_others_are_offered(studio: Studio) -> None:
    studio.open(f"{BASE}&fail=1,1&planner=two-color")
    assert "two-color cannot plan for 4x4 minus 1x1@1,1: it needs every row" in studio.text("notice")
    studio.wait("compared")
    offers = studio.browser.find_elements(By.CSS_SELECTOR, "#offers button")
    assert [offer.text.partition(":")[0] for offer in offers] == ["Use weave", "Use latency"]
    offers[0].click()
    studio.wait()
    assert "planner=weave" in studio.fragment
    assert studio.find("#plan dd").text == "weave"
    assert studio.text("notice") == studio.text("offers") == ""


def test_a_wrong_shape_is_explained(studio: Studio) -> None:
    studio.open()
    field = studio.find("#shape")
    field.clear()
    field.send_keys("99x99", Keys.ENTER)
    studio.until(lambda: "the studio shows up to 2,048" in studio.text("notice"))
    assert field.get_attribute("aria-invalid") == "true"
    field.clear()
    field.send_keys("2×3", Keys.ENTER)
    studio.wait()
    assert studio.fragment.startswith("shape=2x3&")
    assert len(studio.browser.find_elements(By.CSS_SELECTOR, ".chip")) == 6


@pytest.mark.slow
def test_everything_else_is_shown(studio: Studio) -> None:
    studio.open(f"{BASE}&fail=2x2@0,0")
    studio.wait("compared")
    rows = [row.text.split()[0] for row in studio.browser.find_elements(By.CSS_SELECTOR, "#alternatives tbody tr")]
    assert {"weave", "latency", "hamiltonian", "row-pairs", "two-color", "sub-mesh"} <= set(rows)
    assert studio.text("proof").startswith("✓ Proven all-reduce: every contribution of 12 chips")
    assert studio.text("command") == (
        "meshmend plan 4x4 --fail 2x2@0,0 --planner auto:budget_s=0.5 --payload 1MB --hardware tpu-v6e"
    )
    Select(studio.find("#planner")).select_by_value("hamiltonian")
    studio.wait()
    assert studio.find("#plan dd").text == "hamiltonian"
    studio.find("[data-view='steps']").click()
    studio.until(lambda: studio.text("film-now").startswith("step 1 of 22"))
    sums = studio.run("return document.getElementById('film').toDataURL()")
    studio.find("#film-forward").click()
    assert studio.text("film-now").startswith("step 2 of 22, ")
    studio.find("#film-at").send_keys(Keys.END)
    assert studio.text("film-now").startswith("step 22 of 22, ")
    copies = studio.run("return document.getElementById('film').toDataURL()")
    assert (copies == sums) is False, "copies are dashed"
    studio.find("[data-view='load']").click()


def test_nothing_moves_away_from_the_pointer_while_alternatives_come_in(studio: Studio) -> None:
    places = (
        "return [...document.querySelectorAll('button, select, input, .chip')].map(node => "
        "[node.id, ...Object.values(node.getBoundingClientRect().toJSON())])"
    )
    studio.open(f"{BASE}&fail=2x2@0,0")
    studio.run("document.querySelector('#alternatives tbody').replaceChildren()")  # as if none had come yet
    before = studio.run(places)
    studio.wait("compared")
    assert len(studio.browser.find_elements(By.CSS_SELECTOR, "#alternatives tbody tr")) > 5
    assert studio.run(places) == before


def test_the_picture_and_the_plan_are_files(studio: Studio, tmp_path: Path) -> None:
    studio.browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    studio.open(f"{BASE}&fail=2x2@0,0&fail-cable=3,0-3,1")
    studio.find("#export-svg").click()
    picture = studio.until(lambda: next(tmp_path.glob("meshmend-4x4.svg"), None))
    root = ElementTree.fromstring(studio.until(lambda: picture.read_text(encoding="utf-8")))  # noqa: S314
    name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{name}svg"
    assert len(root.findall(f".//{name}rect")) == 17, "one per chip, and the ground"
    assert root.findtext(f"{name}title") == "4x4 minus 2x2@0,0, 1 cable"
    studio.find("#export-plan").click()
    plan = studio.until(lambda: next(tmp_path.glob("meshmend-4x4.npz"), None))
    assert mm.load(plan).mesh == mm.Mesh("4x4", failed=["2x2@0,0"], failed_cables=["3,0-3,1"])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read(studio: Studio, theme: str) -> None:
    scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    studio.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    studio.open(f"{BASE}&fail=2x2@0,0&cable-rate=3,0-3,1=1/2")
    studio.wait("compared")
    assert studio.run("return document.documentElement.dataset.theme") == theme
    found = studio.run(CONTRASTS)
    assert len(found) > 60
    assert [one for one in found if one[0] < 4.5] == []


def test_a_phone_needs_no_scrolling_to_the_side(studio: Studio) -> None:
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    studio.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        for fragment in (f"{BASE}&fail=2x2@0,0&fail-cable=3,0-3,1", "shape=4x8&payload=1KB"):
            studio.open(fragment)
            studio.wait("compared")
            assert studio.run("return document.documentElement.scrollWidth") == 390
            assert studio.run(WIDE) == []
    finally:
        studio.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_everything_has_a_name(studio: Studio) -> None:
    studio.open()
    nameless = studio.run(
        "return [...document.querySelectorAll('button, input, select, [role=button], img, [role=img]')].filter(n => "
        "!(n.getAttribute('aria-label') || n.labels?.length || n.textContent.trim() || n.hasAttribute('alt')))"
        ".map(n => n.outerHTML.slice(0, 80))"
    )
    assert nameless == []
