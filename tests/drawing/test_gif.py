from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from meshmend import Mesh, Schedule, plan
from meshmend.drawing import draw
from meshmend.drawing.film import film
from meshmend.drawing.gif import MAX_FRAMES, shown_steps
from meshmend.drawing.style import BLUE_CHIP, FULL, INK, ORANGE, RED, YELLOW
from meshmend.errors import DrawingError


def test_a_gif_has_a_frame_a_step(tmp_path: Path) -> None:
    schedule = plan(Mesh("4x4", failed=["2x2@0,0"]), "hamiltonian")
    frames = []
    drawing = draw(schedule, tmp_path / "steps.gif", on_frame=lambda: frames.append(1))
    assert (drawing.what, drawing.note) == ("steps", "")
    assert len(frames) == schedule.n_steps
    with Image.open(drawing.path) as image:
        # Equal neighbouring frames are stored as one that lasts longer; the step number makes them differ.
        assert image.n_frames == schedule.n_steps  # type: ignore[attr-defined]
        assert image.info["loop"] == 0


def test_frames_hold_the_transfers_of_their_step() -> None:
    schedule = plan(Mesh("8x8", failed=["2x2@2,2"]), "row-pairs", segments=2)
    shown = film(schedule)
    src, dst, phase = shown.arrows
    for step in range(schedule.n_steps):
        rows = slice(schedule.step_starts[step], schedule.step_starts[step + 1])
        expected = set(zip(*(c[rows].tolist() for c in (schedule.src, schedule.dst, schedule.phase)), strict=True))
        frame = shown.frame(step)
        assert set(zip(src[frame].tolist(), dst[frame].tolist(), phase[frame].tolist(), strict=True)) == expected


@pytest.mark.parametrize("shape", ["4x4", "32x32"])
def test_colours_keep_their_places_however_few_their_pixels(shape: str, tmp_path: Path) -> None:
    schedule = plan(Mesh(shape, failed=["2x2@0,0"]), "row-pairs", verify=False)
    draw(schedule, tmp_path / "steps.gif", steps=(2, 4))
    with Image.open(tmp_path / "steps.gif") as image:
        assert image.n_frames == 3  # type: ignore[attr-defined]
        pixels = np.asarray(image.convert("RGB"))
    area = pixels.shape[0] * pixels.shape[1]
    for colour in (RED, YELLOW, BLUE_CHIP, ORANGE, INK):
        exact = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (pixels == exact).all(axis=2).sum() > area / 20_000, colour
    assert (pixels[0] == 255).all()


def test_long_schedules_are_thinned_and_say_so(tmp_path: Path) -> None:
    schedule = plan(Mesh("3x3"), "weave", chunks=256, verify=False)
    steps = shown_steps(film(schedule))
    assert schedule.n_steps == 179
    assert len(steps) <= MAX_FRAMES
    assert steps[0] == 0
    assert steps[-1] == 178
    drawing = draw(schedule, tmp_path / "steps.gif")
    assert drawing.note == "shows 90 of 179 steps; an .html page shows them all"


def test_steps_outside_the_schedule_and_empty_schedules_are_refused() -> None:
    with pytest.raises(DrawingError, match=r"Steps 3 to 99 are not in the schedule, which has steps 0 to 29"):
        film(plan(Mesh("4x4"), "hamiltonian"), (3, 99))
    with pytest.raises(DrawingError, match="nothing to show step by step"):
        film(Schedule(Mesh("1x1"), total_chunks=1, step=[], src=[], dst=[], op=[], owners=[0]))


def test_a_gif_follows_one_chunk(tmp_path: Path) -> None:
    schedule = plan(Mesh("4x4", failed=["2x2@0,0"]), "hamiltonian")
    draw(schedule, tmp_path / "steps.gif", chunks=[3])
    with Image.open(tmp_path / "steps.gif") as image:
        image.seek(0)
        start = np.asarray(image.convert("RGB"))
        image.seek(schedule.n_steps - 1)
        end = np.asarray(image.convert("RGB"))
    full = [int(FULL[i : i + 2], 16) for i in (1, 3, 5)]
    filled = [int((picture == full).all(axis=2).sum()) for picture in (start, end)]
    # Twelve chips: at first each holds a twelfth, in the end all of it. The legend has the colour in both.
    assert filled[1] > 4 * filled[0] > 0
    with pytest.raises(DrawingError, match="A GIF follows one chunk: got 2"):
        draw(schedule, tmp_path / "steps.gif", chunks=[3, 4])
