"""The page that shows a schedule step by step: what it holds, and that it works in a browser without a network."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from chromium import open_chromium, read_log, requests
from meshmend import Mesh, Op, Schedule, plan
from meshmend.drawing import draw, page
from meshmend.drawing.film import film
from meshmend.drawing.page import leb128
from meshmend.errors import DrawingError


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert found
    return dict(json.loads(found[1])["film"])


def numbers_of(data: bytes) -> list[int]:
    """Read LEB128 back, one byte at a time."""
    numbers, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if not byte & 128:
            numbers.append(value)
            value = shift = 0
    return numbers


def frames_of(data: dict[str, Any]) -> list[set[tuple[int, int, int]]]:
    """Return the arrows of every step."""
    numbers = numbers_of(base64.b64decode(data["changes"]))
    frames, now, at = [], set[int](), 0
    while at < len(numbers):
        changed = np.cumsum(numbers[at + 1 : at + 1 + numbers[at]])
        at += 1 + numbers[at]
        now = now ^ set(changed.tolist())
        frames.append({(data["src"][i], data["dst"][i], data["phase"][i]) for i in now})
    return frames


def held_after(schedule: Schedule) -> Iterator[np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
    """After each step, the part of each chunk's sum that each chip holds, from sets of contributors."""
    n, total = schedule.mesh.n_chips, schedule.total_chunks
    gathers = str(schedule.collective) == "all-gather"
    held = [[{chip} if not gathers or schedule.owners[k] == chip else set() for k in range(total)] for chip in range(n)]
    for step in range(schedule.n_steps):
        written = {}
        for i in np.flatnonzero(schedule.step == step).tolist():
            src, dst, first = int(schedule.src[i]), int(schedule.dst[i]), int(schedule.first_chunk[i])
            for k in range(first, first + int(schedule.n_chunks[i])):
                kept = held[dst][k] if schedule.op[i] == Op.REDUCE else set()
                written[dst, k] = kept | held[src][k]
        for (dst, k), now in written.items():
            held[dst][k] = now
        yield np.array([[len(one) for one in row] for row in held]) / (1 if gathers else n)


FILLED = [
    ("4x4", "row-pairs", ["2x2@2,2"], "all-reduce"),
    ("3x4", "weave", ["0,0"], "all-reduce"),
    ("4x4", "hamiltonian", [], "reduce-scatter"),
    ("3x4", "gather", [], "all-gather"),
]


@pytest.mark.parametrize(("shape", "planner", "failed", "collective"), FILLED, ids=str)
def test_chips_fill_as_their_sums_become_complete(
    shape: str, planner: str, failed: list[str], collective: str, tmp_path: Path
) -> None:
    schedule = plan(Mesh(shape, failed=failed), planner, collective=collective)
    draw(schedule, tmp_path / "steps.html")
    data = data_of(tmp_path / "steps.html")
    numbers = iter(numbers_of(base64.b64decode(data["filling"])))
    level = np.zeros(schedule.mesh.n_chips, dtype=int)
    for held in held_after(schedule):
        chip = 0
        for _ in range(next(numbers)):
            code = next(numbers)
            chip += code // 32
            level[chip] ^= code % 32
        exact = held.mean(axis=1) * data["levels"]
        assert ((level <= exact + 1e-9) & (exact < level + 1 + 1e-9)).all()
        assert ((level == data["levels"]) == (held == 1).all(axis=1)).all()
    assert next(numbers, None) is None
    if collective != "reduce-scatter":
        assert (level == data["levels"]).all()


def test_a_chunk_can_be_followed(tmp_path: Path) -> None:
    schedule = plan(Mesh("3x4", failed=["0,0"]), "weave")
    draw(schedule, tmp_path / "steps.html", chunks=[5, 0])
    paths = data_of(tmp_path / "steps.html")["chunks"]
    assert [path["chunk"] for path in paths] == [5, 0]
    for path in paths:
        transfers = list(zip(path["step"], path["src"], path["dst"], path["adds"], strict=True))
        after = np.ones(schedule.mesh.n_chips)
        for step, held in enumerate(held_after(schedule)):
            before = after.copy()
            for _, src, dst, adds in (row for row in transfers if row[0] == step):
                after[dst] = before[src] + (before[dst] if adds else 0)
            assert after / schedule.mesh.n_chips == pytest.approx(held[:, path["chunk"]])
    draw(schedule, tmp_path / "all.html")
    assert len(data_of(tmp_path / "all.html")["chunks"]) == 4
    with pytest.raises(DrawingError, match="There is no chunk 999"):
        draw(schedule, tmp_path / "steps.html", chunks=[999])


def test_steps_outside_the_schedule_and_empty_schedules_are_refused() -> None:
    with pytest.raises(DrawingError, match=r"Steps 3 to 99 are not in the schedule, which has steps 0 to 29"):
        film(plan(Mesh("4x4"), "hamiltonian"), (3, 99))
    with pytest.raises(DrawingError, match="nothing to show step by step"):
        film(Schedule(Mesh("1x1"), total_chunks=1, step=[], src=[], dst=[], op=[], owners=[0]))


@pytest.mark.parametrize(
    ("shape", "planner", "failed", "parameters"),
    [
        ("8x8", "row-pairs", ["2x2@2,2"], {"segments": 3}),
        ("6x4", "two-color", [], {}),
        ("16x16", "hamiltonian", ["4x2@2,2"], {}),
    ],
)
def test_a_page_holds_exactly_the_transfers(
    shape: str, planner: str, failed: list[str], parameters: dict[str, Any], tmp_path: Path
) -> None:
    schedule = plan(Mesh(shape, failed=failed), planner, **parameters)
    draw(schedule, tmp_path / "steps.html")
    data = data_of(tmp_path / "steps.html")
    frames = frames_of(data)
    assert len(frames) == schedule.n_steps
    for step, frame in enumerate(frames):
        rows = np.flatnonzero(schedule.step == step)
        expected = {(int(schedule.src[i]), int(schedule.dst[i]), int(schedule.phase[i])) for i in rows}
        assert frame == expected
    failed_chips = [x for row, column in np.argwhere(~schedule.mesh.live) for x in (column, row)]
    assert data["failed"] == failed_chips
    assert [phase["name"] for phase in data["phases"]] == list(schedule.phase_names)


def test_numbers_of_any_length_survive() -> None:
    numbers = [0, 1, 127, 128, 16383, 16384, 2**21 - 1, 2**21, 2**28 - 1]
    written = leb128(np.array(numbers))
    assert numbers_of(written) == numbers
    assert len(written) == 3 * 1 + 2 * 2 + 2 * 3 + 2 * 4


def test_large_schedules_give_small_pages(tmp_path: Path) -> None:
    schedule = plan(Mesh("32x32", failed=["4x2@6,8"]), "row-pairs", verify=False)
    assert schedule.n_transfers > 300_000
    assert draw(schedule, tmp_path / "steps.html").n_bytes < 1_000_000


def test_a_page_that_would_be_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_PAGE_BYTES", 20_000)
    schedule = plan(Mesh("8x8"), "row-pairs")
    with pytest.raises(DrawingError, match=r"Show fewer steps \(this schedule has 36\), as in --steps 0-100"):
        draw(schedule, tmp_path / "steps.html")
    assert not (tmp_path / "steps.html").exists()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with open_chromium(tmp_path_factory.mktemp("profile")) as chrome:
        yield chrome


class Page:
    """A page in the browser, by what a reader can see and touch."""

    def __init__(self, browser: webdriver.Chrome, path: Path) -> None:
        self.browser = browser
        browser.get("about:blank")
        for log in ("browser", "performance"):
            read_log(browser, log)  # what was before is not this page's
        browser.get(path.as_uri())

    def click(self, name: str) -> None:
        self.browser.find_element(By.ID, name).click()

    def text(self, name: str) -> str:
        return self.browser.find_element(By.ID, name).text

    @property
    def step(self) -> int:
        found = re.match(r"Step (\d+) of 0 to (\d+): ([\d,]+) arrows?", self.text("now"))
        assert found, self.text("now")
        return int(found[1])

    @property
    def n_arrows(self) -> int:
        return int(self.text("now").split(": ")[1].split(" ")[0].replace(",", ""))

    @property
    def pixels(self) -> str:
        return str(self.browser.execute_script("return document.getElementById('mesh').toDataURL()"))

    def slide_to(self, position: float) -> None:
        """Click the slider at a place between 0 and 1."""
        slider = self.browser.find_element(By.ID, "slider")
        offset = round((position - 0.5) * (slider.size["width"] - 16))
        ActionChains(self.browser).move_to_element_with_offset(slider, offset, 0).click().perform()

    def press(self, key: str) -> None:
        ActionChains(self.browser).send_keys(key).perform()

    def assert_quiet(self) -> None:
        """No word on the console, and no request but for the page itself."""
        assert read_log(self.browser, "browser") == []
        assert all(url.startswith(("file:", "data:")) for url in requests(self.browser))


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return plan(Mesh("8x8", failed=["2x2@2,2"]), "row-pairs")


@pytest.fixture
def shown(browser: webdriver.Chrome, schedule: Schedule, tmp_path: Path) -> Page:
    draw(schedule, tmp_path / "steps.html")
    return Page(browser, tmp_path / "steps.html")


def arrows_in(schedule: Schedule, step: int) -> int:
    rows = schedule.step == step
    return len(set(zip(schedule.src[rows], schedule.dst[rows], schedule.phase[rows], strict=True)))


def test_stepping_forward_and_back(shown: Page, schedule: Schedule) -> None:
    assert shown.step == 0
    first = shown.pixels
    for step in range(1, 6):
        shown.click("forward")
        assert shown.step == step
        assert shown.n_arrows == arrows_in(schedule, step)
    assert shown.pixels != first
    for step in reversed(range(5)):
        shown.click("back")
        assert shown.step == step
        assert shown.n_arrows == arrows_in(schedule, step)
    assert shown.pixels == first
    shown.click("back")
    assert shown.step == 0
    shown.click("end")
    assert shown.step == schedule.n_steps - 1
    assert shown.n_arrows == arrows_in(schedule, schedule.n_steps - 1)
    shown.click("forward")
    assert shown.step == schedule.n_steps - 1
    shown.click("start")
    assert shown.pixels == first
    shown.assert_quiet()


def test_the_slider_goes_anywhere(shown: Page, schedule: Schedule) -> None:
    for position in (0.5, 1.0, 0.25, 0.0):
        shown.slide_to(position)
        assert abs(shown.step - position * (schedule.n_steps - 1)) <= 1
        assert shown.n_arrows == arrows_in(schedule, shown.step)
    shown.assert_quiet()


def test_play_and_pause(shown: Page, schedule: Schedule) -> None:
    shown.browser.find_element(By.CSS_SELECTOR, "#speed option[value='150']").click()
    assert shown.text("play") == "Play"
    shown.click("play")
    assert shown.text("play") == "Pause"
    wait_until(lambda: shown.step >= 3)
    shown.click("play")
    assert shown.text("play") == "Play"
    stopped = shown.step
    time.sleep(0.5)
    assert shown.step == stopped
    # It stops by itself at the end, and plays again from the start.
    shown.browser.find_element(By.CSS_SELECTOR, "#speed option[value='33']").click()
    shown.click("play")
    wait_until(lambda: shown.step == schedule.n_steps - 1 and shown.text("play") == "Play")
    shown.click("play")
    wait_until(lambda: 0 < shown.step < schedule.n_steps - 1)
    shown.click("back")
    assert shown.text("play") == "Play"
    shown.assert_quiet()


def test_keys(shown: Page, schedule: Schedule) -> None:
    shown.press(Keys.ARROW_RIGHT)
    shown.press(Keys.ARROW_RIGHT)
    shown.press(Keys.ARROW_LEFT)
    assert shown.step == 1
    shown.press(Keys.END)
    assert shown.step == schedule.n_steps - 1
    shown.press(Keys.HOME)
    assert shown.step == 0
    shown.press(Keys.SPACE)
    assert shown.text("play") == "Pause"
    shown.press(Keys.SPACE)
    assert shown.text("play") == "Play"
    shown.assert_quiet()


def test_the_legend_names_the_phases_and_counts_their_arrows(shown: Page, schedule: Schedule) -> None:
    shown.slide_to(0.3)
    rows = shown.browser.find_elements(By.CSS_SELECTOR, "#phases tr")
    assert [row.find_elements(By.TAG_NAME, "td")[1].text for row in rows] == [p.name for p in schedule.phases]
    counts = [row.find_elements(By.TAG_NAME, "td")[2].text for row in rows]
    assert sum(int(count or 0) for count in counts) == shown.n_arrows
    assert ["idle" in (row.get_attribute("class") or "") for row in rows] == [count == "" for count in counts]
    assert "4 failed chips" in shown.text("chips")


def test_the_hole_is_red_on_the_canvas(shown: Page) -> None:
    share = shown.browser.execute_script(
        """const c = document.getElementById('mesh'), p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        let red = 0;
        for (let i = 0; i < p.length; i += 4) red += p[i] === 0xCC && p[i + 1] === 0x33 && p[i + 2] === 0x11;
        return red / (p.length / 4);"""
    )
    # Four squares of 0.48 cells in a picture of 8.16 cells, less the white crosses.
    assert 0.6 * 4 * 0.48**2 / 8.16**2 < share <= 4 * 0.48**2 / 8.16**2 * 1.02


def test_pointing_at_an_arrow_names_it(shown: Page) -> None:
    shown.slide_to(0.3)
    canvas = shown.browser.find_element(By.ID, "mesh")
    cell = canvas.size["width"] / 8.16
    # Half-way between chips (0,0) and (0,1), a little to the south: the link that goes east.
    x, y = (0.58 + 0.5) * cell, (0.58 + 0.085) * cell
    ActionChains(shown.browser).move_to_element_with_offset(
        canvas, round(x - canvas.size["width"] / 2), round(y - canvas.size["height"] / 2)
    ).perform()
    assert shown.text("tip") == "(0,0) → (0,1): row rings: reduce-scatter, adds"


def test_following_a_chunk_in_the_browser(browser: webdriver.Chrome, schedule: Schedule, tmp_path: Path) -> None:
    draw(schedule, tmp_path / "steps.html", chunks=[7])
    shown = Page(browser, tmp_path / "steps.html")
    everything = (*held_after(schedule),)
    for position in (0.0, 0.4, 0.7, 1.0):
        shown.slide_to(position)
        full = int((everything[shown.step][:, 7] == 1).sum())
        assert shown.text("now").endswith(f"{full} of 60 chips hold the sum of chunk 7")
    followed = shown.pixels
    shown.browser.find_element(By.CSS_SELECTOR, "#follow option[value='-1']").click()
    assert shown.text("now").endswith("60 of 60 chips hold all sums")
    assert shown.pixels != followed
    label = shown.browser.find_element(By.ID, "mesh").get_attribute("aria-label")
    assert label is not None
    assert shown.text("now") in label
    shown.assert_quiet()


def luminance(colour: str) -> float:
    rgb = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_word_can_be_read_in_both_themes_and_on_a_phone(
    browser: webdriver.Chrome, schedule: Schedule, tmp_path: Path, theme: str, width: int
) -> None:
    draw(schedule, tmp_path / "steps.html")
    features = [{"name": "prefers-color-scheme", "value": theme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        shown = Page(browser, tmp_path / "steps.html")
        assert browser.execute_script("return document.documentElement.scrollWidth") == width
        assert shown.browser.find_element(By.ID, "speed").get_attribute("value") == "1200"  # less motion was asked for
        found = browser.execute_script(
            """return [...document.querySelectorAll('h1, p, button, select, label, td, .now, .tip, kbd')]
            .filter(e => e.innerText.trim()).map(e => {
              let under = e, back;
              do {
                back = getComputedStyle(under).backgroundColor;
                under = under.parentElement;
              } while (/, 0\\)$/.test(back) && under);
              return [e.innerText, getComputedStyle(e).color, back];
            });"""
        )
        assert len(found) > 15
        for words, colour, back in found:
            light, dark = sorted((luminance(colour), luminance(back)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (words, colour, back)
        assert (luminance(found[0][2]) < 0.1) == (theme == "dark")
        small = browser.execute_script(
            """return [...document.querySelectorAll('button, select')]
            .filter(e => e.offsetHeight < 38 || e.offsetWidth < 38).length;"""
        )
        assert small == 0
        shown.assert_quiet()
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_hostile_name_stays_a_name(browser: webdriver.Chrome, tmp_path: Path) -> None:
    name = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
    schedule = Schedule(
        Mesh("1x2"), total_chunks=1, step=[0], src=[0], dst=[1], op=[Op.REDUCE], owners=[1], phase_names=(name,),
        planner=name,
    )  # fmt: skip
    draw(schedule, tmp_path / "steps.html")
    shown = Page(browser, tmp_path / "steps.html")
    assert shown.n_arrows == 1
    assert shown.browser.find_element(By.CSS_SELECTOR, "#phases tr").text.startswith(name)
    assert shown.browser.title.startswith("</script>")
    shown.assert_quiet()


@pytest.mark.parametrize("name", ["{{data}}", "{{facts}}", "{{title}} {{data}}", "{{nothing}}"])
def test_a_name_is_never_part_of_the_template(name: str, tmp_path: Path) -> None:
    """It would bring the page's data, with its quotes, into the middle of a heading."""
    schedule = Schedule(
        Mesh("1x2"), total_chunks=1, step=[0], src=[0], dst=[1], op=[Op.REDUCE], owners=[1], phase_names=(name,),
        planner=name,
    )  # fmt: skip
    draw(schedule, tmp_path / "steps.html")
    text = (tmp_path / "steps.html").read_text(encoding="utf-8")
    assert f"<title>{name} all-reduce on 1x2</title>" in text
    assert f"<h1>{name} all-reduce on 1x2</h1>" in text
    assert data_of(tmp_path / "steps.html")["name"] == name
    assert text.count('"film":') == 1


@pytest.mark.slow
def test_a_large_page_steps_quickly(browser: webdriver.Chrome, tmp_path: Path) -> None:
    schedule = plan(Mesh("32x32", failed=["4x2@6,8"]), "row-pairs", verify=False)
    draw(schedule, tmp_path / "steps.html", steps=(60, 90))
    shown = Page(browser, tmp_path / "steps.html")
    assert shown.step == 60
    shown.click("end")
    assert shown.step == 90
    assert shown.n_arrows == arrows_in(schedule, 90)
    took = browser.execute_script(  # in the page's own time: what drives the browser takes longer than a step
        "const started = performance.now(); for (let i = 0; i < 10; i++) document.getElementById('back').click();"
        "return performance.now() - started;"
    )
    assert shown.step == 80
    assert took < 5000
    shown.assert_quiet()


def wait_until(ready: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
