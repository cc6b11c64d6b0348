"""`draw`: a schedule or routes to a file. The file's suffix chooses the format, `what` chooses what is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, get_args

from meshmend.errors import DrawingError
from meshmend.extras import require
from meshmend.schedule import Schedule
from meshmend.topology import Mesh, name_shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

What = Literal["rings", "load", "trees", "steps"]
WHAT: tuple[What, ...] = get_args(What)
STILL, PAGE = (".svg", ".png", ".pdf"), ".html"
MAX_CHIPS = 2**14
"""128×128: the chips of a larger mesh do not fit on a page."""


@dataclass(frozen=True)
class Drawing:
    """The picture that was written."""

    path: Path
    what: str
    n_bytes: int


def draw(
    schedule: Schedule,
    path: str | Path,
    what: What | None = None,
    *,
    chunks: Iterable[int] | None = None,
    steps: tuple[int, int] | None = None,
    title: str | None = None,
) -> Drawing:
    """Draw a schedule to `path`: .svg, .png and .pdf are pictures; .html shows it step by step.

    `what` is one of

    - "rings": who sends to whom, coloured by phase. The default for pictures, unless the schedule is
      made of trees.
    - "load": a heat map of what each link carries.
    - "trees": how the contributions to each of `chunks` come together; four chunks by default.
    - "steps": the transfers of every step, or of `steps` = (first, last), and how complete each chip's sums are. For
      .html, where any of `chunks` can be followed.

    >>> import meshmend as mm, tempfile
    >>> schedule = mm.plan(mm.Mesh("4x4", failed=["2x2@2,2"]), "row-pairs")
    >>> draw(schedule, f"{tempfile.mkdtemp()}/steps.html").what
    'steps'
    """
    path = Path(path)
    kind = check_ending(path, (*STILL, PAGE))
    check_size(schedule.mesh)
    if what is not None and what not in WHAT:
        raise DrawingError(f"There is no picture {what!r}. Pictures: {', '.join(WHAT)}.")
    chosen = what or default_what(schedule, kind)
    if (chosen == "steps") != (kind == PAGE):
        forms = (PAGE,) if chosen == "steps" else STILL
        raise DrawingError(f"{path.name} cannot show {chosen}: {chosen} go into {' or '.join(forms)}.")
    if chunks is not None and chosen not in ("trees", "steps"):
        raise DrawingError(f"Chunks can be chosen for trees and steps, not for {chosen}.")
    if steps is not None and chosen != "steps":
        raise DrawingError(f"Steps can be chosen for .html, not for {chosen}.")
    if chosen != "steps":
        _canvas().write(figure(schedule, chosen, chunks=chunks, title=title), path)
    else:
        from meshmend.drawing.film import film
        from meshmend.drawing.page import write_page

        write_page(film(schedule, steps, chunks), path, title=title, followed=-1 if chunks is None else 0)
    return Drawing(path, chosen, path.stat().st_size)


def figure(
    schedule: Schedule, what: What = "rings", *, chunks: Iterable[int] | None = None, title: str | None = None
) -> Figure:
    """Return a picture as a matplotlib figure, for a notebook or for more drawing; see `draw`."""
    _canvas()
    from meshmend.drawing import trees, views

    check_size(schedule.mesh)
    match what:
        case "rings":
            return views.draw_rings(schedule, title=title)
        case "load":
            return views.draw_load(schedule, title=title)
        case "trees":
            return trees.draw_trees(schedule, chunks, title=title)
        case other:
            raise DrawingError(f"There is no still picture {other!r}. Stills: {', '.join(WHAT[:-1])}.")


def draw_routes(
    mesh: Mesh,
    routes: Iterable[tuple[Sequence[int], Sequence[int]]],
    path: str | Path,
    *,
    title: str | None = None,
) -> Drawing:
    """Draw the network's routes between pairs of chips, given by their coordinates (figures 1 and 2 of the paper)."""
    path = Path(path)
    check_ending(path, STILL)
    check_size(mesh)
    canvas = _canvas()
    from meshmend.drawing import views

    pairs = [(mesh.rank(src), mesh.rank(dst)) for src, dst in routes]
    if not pairs or any(src == dst for src, dst in pairs):
        raise DrawingError("A route joins two different chips; name at least one, as in --route 0,0-3,5.")
    canvas.write(views.draw_routes(mesh, [a for a, _ in pairs], [b for _, b in pairs], title=title), path)
    return Drawing(path, "routes", path.stat().st_size)


def default_what(schedule: Schedule, kind: str) -> What:
    """Return what is shown by default."""
    if kind == PAGE:
        return "steps"
    return "trees" if any("root" in name or "tree" in name for name in schedule.phase_names) else "rings"


def check_ending(path: Path, endings: Sequence[str]) -> str:
    """Return the suffix of a file's name if it is one that can be written."""
    if path.suffix not in endings:
        raise DrawingError(
            f"{path.name} ends in {path.suffix!r}; a drawing is {', '.join(endings[:-1])} or {endings[-1]}."
        )
    if not path.parent.is_dir():
        raise DrawingError(f"{path} cannot be written: there is no directory {path.parent}.")
    return path.suffix


def check_size(mesh: Mesh) -> None:
    """Refuse meshes whose chips would be smaller than a dot."""
    if mesh.size > MAX_CHIPS:
        raise DrawingError(
            f"A {name_shape(mesh.shape)} mesh has {mesh.size:,} chips; up to {MAX_CHIPS:,} fit on a picture. "
            "Draw a smaller mesh with the same kind of hole."
        )


def _canvas() -> ModuleType:
    """Import the part that needs matplotlib; raise an error that says how to install it."""
    require("matplotlib", needed_for="Drawing pictures", extra="draw")
    from meshmend.drawing import canvas

    return canvas
