"""GIF: the steps of a schedule as an animation, for slides and READMEs. The page (`page.py`) can be stepped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from numpy.typing import NDArray
from PIL import Image

from meshmend.drawing.canvas import SETTINGS, Sheet, chip_keys, failed_key, line_key
from meshmend.drawing.film import Film
from meshmend.drawing.fullness import LEVELS, follow
from meshmend.drawing.geometry import Points, head, shorten
from meshmend.drawing.style import (
    CABLE,
    CHIP_EDGE,
    FULL,
    GREY,
    INK,
    RED,
    YELLOW,
    chip_fills,
    phase_looks,
    phases_in_order,
)
from meshmend.schedule import Collective

MAX_FRAMES = 150
"""Frames of a GIF. Of a longer schedule every n-th step is shown, and the picture says so."""
FRAME_MS, LAST_FRAME_MS = 400, 2000
DPI = 110


def shown_steps(film: Film) -> NDArray[np.int64]:
    """Return the steps that get a frame: all, or every n-th and the last."""
    every = -(-film.n_frames // MAX_FRAMES)
    steps = np.arange(film.first, film.last + 1, every)
    return np.union1d(steps, [film.last]) if len(steps) < MAX_FRAMES else steps


def write_gif(film: Film, path: Path, *, title: str | None = None, on_frame: Callable[[], None] = lambda: None) -> None:
    """Write the film; `on_frame` is called after each frame, for a progress bar."""
    schedule = film.schedule
    looks = phase_looks(schedule)
    fills = chip_fills(schedule)
    path_of = follow(schedule, film.chunks[0]) if film.chunks else None
    _, _, phase = film.arrows
    phases = [p for p in phases_in_order(schedule) if (phase == p).any()]
    steps = shown_steps(film)
    every = f", one step in {steps[1] - steps[0]}" if len(steps) < film.n_frames else ""
    with mpl.rc_context(SETTINGS):
        keys: list[Artist] = [line_key(schedule.phase_names[p], looks[p], arrow=True) for p in phases]
        sums = "the sums" if path_of is None else f"the sum of chunk {path_of.chunk}"
        if schedule.collective is Collective.ALL_GATHER:
            sums = "all chunks" if path_of is None else f"chunk {path_of.chunk}"
        keys.append(Patch(facecolor=FULL, edgecolor=CHIP_EDGE, label=f"fills as it gets {sums}"))
        if YELLOW in fills:
            keys += chip_keys()
        sheet = Sheet(
            film.layout,
            title=title or f"{schedule.planner} {schedule.collective} on {schedule.mesh}{every}",
            subtitle="step",
            keys=[*keys, *failed_key(film.layout)],
        )
        axes = sheet.panels[0]
        sheet.draw_mesh(axes, fills)
        canvas: Any = sheet.figure.canvas
        sheet.figure.set_dpi(DPI)
        sheet.subtitle.set_visible(False)
        canvas.draw()
        background = canvas.copy_from_bbox(sheet.figure.bbox)
        sheet.subtitle.set_visible(True)
        length, width = sheet.scale.head
        lines = film.strokes(sheet.scale.chip)
        shafts = [shorten(line, 0.7 * length) for line in lines]
        heads = [head(line, length, width) for line in lines]

        def picture(arrows: NDArray[np.int64], share: NDArray[np.float64], words: str) -> Image.Image:
            canvas.restore_region(background)
            # A chip fills from below; its edge and its name are drawn again over that.
            half, full = sheet.scale.chip, np.flatnonzero(share)
            bars = [
                place + half * np.array([[-1, 1], [1, 1], [1, 1 - 2 * part], [-1, 1 - 2 * part]])
                for place, part in zip(film.layout.live[full], share[full], strict=True)
            ]
            gauges = PolyCollection(bars, facecolors=FULL, edgecolors=CHIP_EDGE, linewidths=0.4)
            sheet.add(axes, gauges)
            axes.draw_artist(gauges)
            gauges.remove()
            for name in axes.texts:
                axes.draw_artist(name)
            sheet.subtitle.set_text(words)
            sheet.figure.draw_artist(sheet.subtitle)
            for p in phases:
                mine = arrows[phase[arrows] == p].tolist()
                if not mine:
                    continue
                pieces: list[Points] = [piece for i in mine for piece in shafts[i]]
                look, lw = looks[p], sheet.scale.line_pt
                shaft = LineCollection(pieces, colors=look.colour, linewidths=lw, capstyle="butt")
                shaft.set_linestyle((0, look.dash) if look.dash else "solid")
                fill = "white" if look.open_head else look.colour
                tips = PolyCollection(
                    [heads[i] for i in mine], facecolors=fill, edgecolors=look.colour, linewidths=0.5 * lw
                )
                for artist in (shaft, tips):
                    sheet.add(axes, artist)
                    axes.draw_artist(artist)
                    artist.remove()
            return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())

        palette = _palette([*(looks[p].colour for p in phases), *fills, FULL])
        frames = []
        for step in steps.tolist():
            arrows = film.frame(step)
            share = film.levels[step - film.first] / LEVELS
            if path_of is not None:
                share, arrows = path_of.share_after(schedule, step), arrows[film.carries(arrows, path_of, step)]
            words = f"step {step} of 0 to {schedule.n_steps - 1}: {len(arrows):,} arrow{'s' * (len(arrows) != 1)}"
            frames.append(picture(arrows, share, words).quantize(palette=palette, dither=Image.Dither.NONE))
            on_frame()
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=False)


def _palette(colours: Sequence[str]) -> Image.Image:
    """Return a palette with every colour of the picture and its mixtures with white, which soften edges.

    A palette made from the pixels would drop a colour that few pixels have, such as the red of a small hole.
    """
    used = dict.fromkeys([*colours, RED, INK, GREY, CABLE, CHIP_EDGE])
    shades = [
        round(255 + part * (255 * channel - 255))
        for colour in used
        for part in (1.0, 0.75, 0.5, 0.25)
        for channel in to_rgb(colour)
    ]
    image = Image.new("P", (1, 1))
    image.putpalette([255, 255, 255, *shades][: 3 * 256])
    return image
