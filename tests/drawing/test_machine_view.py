"""A machine's picture: chips by their operator's names, failed ones named too, a rate on every slow cable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

import meshmend as mm
from drawing.pictures import failed_places, named
from meshmend.drawing import draw_machine, figure
from meshmend.drawing.geometry import FigureLayout, failed_cable_marks
from meshmend.drawing.machine_view import draw_machine as view
from meshmend.errors import DrawingError
from meshmend.machines import Machine, machine_of, parse_description

TEXT = """
meshmend: 1
shape: 3x4
wrap: "1"
chips: {tray0.chip0: [0, 0], tray0.chip1: [0, 1], tray1.chip3: [2, 3]}
failed: [tray1.chip3, "1,1-1,2", "0,0-0,3"]
rates: {"0,0-1,0": 1/2, "1,0-1,3": 3/4}
"""


def machine(text: str = TEXT) -> Machine:
    return machine_of(parse_description(text, "rack/mine.yaml"))


def words(drawn: Figure) -> dict[str, list[tuple[float, float]]]:
    """The words in the picture, and where they are: (x, y) in distances between chips."""
    found: dict[str, list[tuple[float, float]]] = {}
    for text in drawn.axes[0].get_children():
        if isinstance(text, Text) and text.get_text():
            found.setdefault(text.get_text(), []).append(text.get_position())
    return found


def test_chips_have_their_operators_names() -> None:
    found = words(view(machine()))
    assert found["tray0\nchip0"] == [(0, 0)]
    assert found["tray0\nchip1"] == [(1, 0)]
    assert found["1,2"] == [(2, 1)], "a chip without a name keeps its coordinate"
    ((x, y),) = found["tray1\nchip3"]
    assert x == 3
    assert 2 < y < 3, "below the failed chip"
    assert failed_places(view(machine())) == [{(2, 3)}]


def test_every_slow_cable_has_its_rate_and_every_failed_one_its_cross() -> None:
    drawn = view(machine())
    found = words(drawn)
    assert found["1/2"] == [(0, 0.5)]
    # The wrap cable of row 1 leaves the picture on one side and re-enters on the other.
    sides = sorted(x for x, y in found["3/4"] if y == 1)
    assert len(sides) == 2
    assert sides[0] < 0
    assert sides[1] > 3
    (crosses,) = named(drawn, "broken")
    marks = sorted(zip(crosses.get_xdata(), crosses.get_ydata(), strict=True))
    assert marks[1] == (1.5, 1)
    assert (marks[0][0] < 0, marks[0][1]) == (True, 0)
    assert (marks[2][0] > 3, marks[2][1]) == (True, 0)
    legend = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert legend == ["failed chip", "failed cable", "slow cable, rates 1/2 to 3/4"]


def test_a_failed_wrap_cable_is_not_marked_on_a_live_one() -> None:
    layout = FigureLayout(mm.Mesh("1x6", wrap=True, failed_cables=["0,0-0,5"]))
    assert all(not 0 <= x <= 5 for x, _ in failed_cable_marks(layout))
    cube = FigureLayout(mm.Mesh("2x2x2", failed_cables=["0,0,0-1,0,0"]))
    (mark,) = failed_cable_marks(cube)
    ends = cube.places[[0, 4]]
    assert np.isclose(mark[0], ends[:, 0].mean())
    assert mark[1] != ends[0, 1], "on the arc between planes"
    schedule = mm.plan(layout.mesh, "weave", chunks=6)
    (crosses,) = named(figure(schedule, "rings"), "broken")
    assert len(crosses.get_xdata()) == 2


def test_names_that_cannot_be_read_are_left_out() -> None:
    long = machine(TEXT.replace("tray0.chip0", "a" * 40))
    assert "0,0" in words(view(long))
    large = machine('meshmend: 1\nshape: 40x40\nchips: {corner: [0, 0]}\nrates: {"0,0-0,1": 1/2}')
    assert not {"corner", "1/2"} & set(words(view(large)))


def test_it_is_written_where_it_can_be(tmp_path: Path) -> None:
    done = draw_machine(machine(), tmp_path / "mine.svg")
    assert (done.what, done.n_bytes) == ("machine", (tmp_path / "mine.svg").stat().st_size)
    again = draw_machine(machine(), tmp_path / "again.svg", title="mine.yaml")
    assert again.path.read_bytes() == done.path.read_bytes()
    with pytest.raises(DrawingError, match=r"mine.gif ends in '.gif'; a drawing is .svg, .png or .pdf"):
        draw_machine(machine(), tmp_path / "mine.gif")
