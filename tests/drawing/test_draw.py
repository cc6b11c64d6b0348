from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from meshmend import Mesh, plan
from meshmend.drawing import draw, draw_routes, figure
from meshmend.drawing.draw import default_what
from meshmend.errors import DrawingError, MeshError


@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf", ".html"])
def test_the_ending_chooses_the_form(ending: str, tmp_path: Path) -> None:
    magic = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF", ".html": b"<!DOCTYPE html>"}
    drawing = draw(plan(Mesh("2x4"), "row-pairs"), tmp_path / f"picture{ending}")
    assert drawing.path.read_bytes().startswith(magic[ending])
    assert drawing.n_bytes == drawing.path.stat().st_size
    assert drawing.what == ("steps" if ending == ".html" else "rings")


def test_schedules_of_trees_are_drawn_as_trees() -> None:
    schedule = plan(Mesh("4x4"), "hamiltonian")
    assert default_what(schedule, ".svg") == "rings"
    tree = schedule.replace(phase_names=("reduce to the roots", "broadcast from the roots"))
    assert default_what(tree, ".svg") == "trees"
    assert default_what(tree, ".html") == "steps"


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("a.jpg", {}, r"a.jpg ends in '.jpg'; a drawing is .svg, .png, .pdf or .html"),
        ("nowhere/a.svg", {}, "there is no directory"),
        ("a.svg", {"what": "mess"}, "There is no picture 'mess'. Pictures: rings, load"),
        ("a.svg", {"what": "steps"}, r"a.svg cannot show steps: steps go into .html"),
        ("a.html", {"what": "load"}, r"a.html cannot show load: load go into .svg or .png or .pdf"),
        ("a.svg", {"chunks": [1]}, "Chunks can be chosen for trees and steps, not for rings"),
        ("a.svg", {"steps": (0, 1)}, "Steps can be chosen for .html, not for rings"),
    ],
)
def test_what_cannot_be_drawn_is_said(name: str, words: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DrawingError, match=message):
        draw(plan(Mesh("4x4"), "hamiltonian"), tmp_path / name, **words)
    assert not (tmp_path / name).exists()


def test_meshes_without_room_on_a_page_are_refused(tmp_path: Path) -> None:
    mesh = Mesh("129x128")
    with pytest.raises(DrawingError, match="has 16,512 chips; up to 16,384 fit on a picture"):
        draw_routes(mesh, [((0, 0), (1, 1))], tmp_path / "a.svg")


def test_routes_are_between_two_live_chips(tmp_path: Path) -> None:
    mesh = Mesh("4x4", failed=["1,1"])
    with pytest.raises(DrawingError, match="joins two different chips"):
        draw_routes(mesh, [((0, 0), (0, 0))], tmp_path / "a.svg")
    with pytest.raises(DrawingError, match="name at least one"):
        draw_routes(mesh, [], tmp_path / "a.svg")
    with pytest.raises(MeshError, match=r"Chip \(1,1\) has failed"):
        draw_routes(mesh, [((0, 0), (1, 1))], tmp_path / "a.svg")
    assert draw_routes(mesh, [((1, 0), (1, 3))], tmp_path / "a.svg").what == "routes"


def test_a_figure_can_be_drawn_on(tmp_path: Path) -> None:
    schedule = plan(Mesh("4x4"), "two-color")
    picture = figure(schedule, "load", title="Mine")
    assert isinstance(picture, Figure)
    assert any(text.get_text() == "Mine" for text in picture.texts)
    with pytest.raises(DrawingError, match="There is no still picture 'steps'"):
        figure(schedule, "steps")


def test_without_matplotlib_the_page_still_works(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["matplotlib"] = None
import meshmend as mm
from meshmend.drawing import draw
schedule = mm.plan(mm.Mesh("4x4"), "hamiltonian")
draw(schedule, {str(tmp_path / "a.html")!r})
try:
    draw(schedule, {str(tmp_path / "a.svg")!r})
except mm.MeshmendError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Drawing pictures needs matplotlib, which is not installed here" in done.stdout
    assert (tmp_path / "a.html").exists()


def test_numbers_are_shortened_but_letters_keep_their_size(tmp_path: Path) -> None:
    schedule = plan(Mesh("4x4"), "two-color")
    draw(schedule, tmp_path / "ours.svg", "load")
    ours = (tmp_path / "ours.svg").read_text(encoding="utf-8")
    figure(schedule, "load").savefig(tmp_path / "plain.svg")
    plain = (tmp_path / "plain.svg").read_text(encoding="utf-8")
    # matplotlib draws a letter at 64 times its size, scales it back, and then to its size in points.
    assert set(re.findall(r"scale\(.*?\)", ours)) == set(re.findall(r"scale\(.*?\)", plain)) > {"scale(0.015625)"}
    assert len(ours) < len(plain)
