from __future__ import annotations

from collections import Counter
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

from drawing.pictures import (
    assert_legible,
    both_ways,
    failed_coordinates,
    lines_of,
    n_heads,
    named,
    one_way,
    sent_pairs,
)
from meshmend import Mesh, Op, Schedule, plan
from meshmend.drawing import draw, figure
from meshmend.drawing.geometry import FigureLayout, failed_cable_marks
from meshmend.drawing.style import AT_BOUND, BLUE, BLUE_CHIP, DETOURS, RED, VERMILION, YELLOW, phase_looks
from meshmend.drawing.trees import chunk_tree
from meshmend.drawing.views import draw_routes
from meshmend.errors import DrawingError

CASES = [
    ("4x4", "two-color", []),
    ("4x4", "hamiltonian", ["2x2@2,2"]),
    ("4x6", "row-pairs", []),
    ("8x8", "row-pairs", ["2x2@2,2"]),
    ("8x8", "row-pairs", ["2x4@2,2"]),
    ("12x10", "row-pairs", ["2x2@2,2", "2x2@6,6"]),
    ("16x32", "row-pairs", ["4x2@6,8"]),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]} {case[1]} {'+'.join(case[2])}", scope="module")
def schedule(request: pytest.FixtureRequest) -> Schedule:
    shape, planner, failed = request.param
    return plan(Mesh(shape, failed=failed), planner, verify=False)


def failed_chips(mesh: Mesh) -> set[tuple[int, int]]:
    return {(int(row), int(column)) for row, column in np.argwhere(~mesh.live)}


def test_rings_show_each_pair_of_the_reductions_once(schedule: Schedule) -> None:
    picture = figure(schedule, "rings")
    for phase in schedule.phases:
        pairs = sent_pairs(schedule, phase.name)
        adds = all(schedule.op[schedule.phase == schedule.phase_names.index(phase.name)] == Op.REDUCE)
        plain = lines_of(picture, f"{phase.name}, both ways")
        arrows = lines_of(picture, phase.name)
        assert len(plain.get_paths() if plain else []) == (both_ways(schedule.mesh, pairs) if adds else 0)
        assert len(arrows.get_paths() if arrows else []) == (one_way(schedule.mesh, pairs) if adds else 0)
        assert n_heads(picture, phase.name) == (one_way(schedule.mesh, pairs) if adds else 0)
    assert_legible(picture)


def test_holes_are_red_in_every_panel(schedule: Schedule) -> None:
    for what in ("rings", "load", "trees"):
        picture = figure(schedule, what)
        positions = failed_coordinates(picture)
        n_panels = len(named(picture, "chips"))
        assert positions == [failed_chips(schedule.mesh)] * (n_panels if schedule.mesh.holes else 0)
        chips = named(picture, "chips")[0]
        assert len(chips.get_offsets()) == schedule.mesh.n_chips


def test_yellow_chips_are_those_beside_the_hole() -> None:
    schedule = plan(Mesh("8x8", failed=["2x2@2,2"]), "row-pairs")
    picture = figure(schedule)
    for squares in named(picture, "chips"):
        fills = [to_hex(fill, keep_alpha=False).upper() for fill in squares.get_facecolor()]
        chips = [(round(y), round(x)) for x, y in squares.get_offsets()]
        assert set(fills) == {YELLOW, BLUE_CHIP}
        yellow = {chip for chip, fill in zip(chips, fills, strict=True) if fill == YELLOW}
        assert yellow == {(row, column) for row in (2, 3) for column in (0, 1, 4, 5, 6, 7)}


def test_load_colours_and_widens_what_each_link_carries() -> None:
    # Every hop of a Hamiltonian ring is between neighbours, so a plain count of chunks is the load.
    schedule = plan(Mesh("4x6", failed=["2x2@0,0"]), "hamiltonian")
    carried = Counter[tuple[int, int]]()
    for src, dst, n in zip(schedule.src, schedule.dst, schedule.n_chunks, strict=True):
        carried[int(src), int(dst)] += int(n)
    picture = figure(schedule, "load")
    (lines,) = named(picture, "load")
    assert len(lines.get_paths()) == 2 * schedule.mesh.n_cables
    widths = np.asarray(lines.get_linewidths())
    assert (np.isclose(widths, widths.max())).sum() == sum(n == max(carried.values()) for n in carried.values())
    assert (np.isclose(widths, widths.min())).sum() == 2 * schedule.mesh.n_cables - len(carried)
    shades = {tuple(np.round(colour, 3)) for colour in np.asarray(lines.get_colors())}
    assert len(shades) == len({*carried.values(), 0})
    busiest = max(carried.values()) / schedule.total_chunks
    assert any(f"busiest link {busiest:.3f}" in text.get_text() for text in picture.texts)
    assert_legible(picture)


def test_load_is_grey_at_the_bound_blue_below_it_and_red_above() -> None:
    # Four chips and four cables: the bound is (P − 1)/E = 3/4. By hand, six links carry all of it and two nothing.
    mesh = Mesh("2x2")
    rows = [(0, 1, Op.REDUCE, 0), (2, 3, Op.REDUCE, 0), (1, 3, Op.REDUCE, 1)]
    rows += [(b, a, Op.COPY, 3 - step) for a, b, _, step in rows]
    rows.sort(key=lambda row: row[3])
    src, dst, op, step = zip(*rows, strict=True)
    schedule = Schedule(mesh, total_chunks=1, step=step, src=src, dst=dst, op=op, owners=[3])
    picture = figure(schedule, "load")
    assert any(
        "busiest link 1.000 of the payload, mean 0.750, bound 0.750" in text.get_text() for text in picture.texts
    )
    (lines,) = named(picture, "load")
    colours = Counter(to_hex(colour, keep_alpha=False).upper() for colour in lines.get_colors())
    assert colours[BLUE] == 2
    (above,) = set(colours) - {BLUE}
    red, green, blue = (int(above[i : i + 2], 16) for i in (1, 3, 5))
    assert red > green > blue
    # A third of the way from the bound to twice the bound, where it is vermilion.
    for part, at, full in zip((red, green, blue), AT_BOUND_RGB, VERMILION_RGB, strict=True):
        assert abs(part - (at + (full - at) / 3)) <= 2
    flat = figure(plan(mesh, "two-color"), "load")
    for colour in named(flat, "load")[0].get_colors():
        assert np.abs(np.round(255 * np.asarray(colour[:3])) - AT_BOUND_RGB).max() <= 1


AT_BOUND_RGB, VERMILION_RGB = ([int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (AT_BOUND, VERMILION))


def test_the_halves_of_two_color_change_places_between_the_panels() -> None:
    picture = figure(plan(Mesh("4x4"), "two-color"))
    seen_in = []
    for axes in picture.axes:
        found = [artist for artist in axes.collections if isinstance(artist, LineCollection)]
        lines = [artist for artist in found if "both ways" in str(artist.get_label())]
        seen_in.append(
            {str(line.get_label())[:7]: to_hex(tuple(np.asarray(line.get_colors())[0][:3])).upper() for line in lines}
        )
    assert seen_in == [{"along X": VERMILION, "along Y": BLUE}, {"along Y": VERMILION, "along X": BLUE}]
    words = [text.get_text() for legend in picture.legends for text in legend.get_texts()]
    assert words == ["along X, then along Y (both ways)", "along Y, then along X (both ways)"]


def test_rings_round_the_hole_have_a_colour_each() -> None:
    schedule = plan(Mesh("16x32", failed=["4x2@6,8"]), "row-pairs", verify=False)
    picture = figure(schedule)
    heads = [heads for heads in named(picture, "row rings of shards: reduce-scatter: heads") if len(heads.get_paths())]
    colours = Counter(to_hex(c, keep_alpha=False).upper() for one in heads for c in one.get_facecolor())
    # The rings of rows 6 to 9 go round; each crosses the hole twice, in both directions.
    assert len(set(colours) & set(DETOURS)) == 4
    assert "round the hole: a colour per ring" in [
        t.get_text() for legend in picture.legends for t in legend.get_texts()
    ]
    assert_legible(picture)


def test_large_trees_are_few_and_wide() -> None:
    schedule = plan(Mesh("32x32", failed=["4x2@6,8"]), "row-pairs", verify=False)
    picture = figure(schedule, "trees")
    assert len(picture.axes) == 1
    assert not any("heads" in str(artist.get_label()) for artist in picture.axes[0].get_children())
    assert_legible(picture)


@pytest.mark.parametrize(
    ("planner", "collective", "failed"),
    [
        ("row-pairs", "all-reduce", []),
        ("row-pairs", "all-reduce", ["2x2@2,2"]),
        ("row-pairs", "all-reduce", ["4x2@2,2"]),
        ("weave", "all-gather", ["2x2@0,2"]),
        ("gather", "all-gather", ["2x2@0,2"]),
        ("row-pairs", "all-gather", ["2x2@0,2"]),
    ],
)
def test_the_tree_of_a_chunk_spans_the_chips_from_its_owner(planner: str, collective: str, failed: list[str]) -> None:
    schedule = plan(Mesh("8x8", failed=failed), planner, collective=collective)
    for chunk in range(0, schedule.total_chunks, 3):
        tree = chunk_tree(schedule, chunk)
        # Contributions go to the owner; of an all-gather, the chunk comes from there.
        near, far = (tree.src, tree.dst) if collective == "all-gather" else (tree.dst, tree.src)
        graph = nx.DiGraph(list(zip(near.tolist(), far.tolist(), strict=True)))
        assert nx.is_arborescence(graph)
        assert graph.number_of_nodes() == schedule.mesh.n_chips
        owner = int(schedule.owners[chunk])
        assert graph.in_degree(owner) == 0
        assert tree.depth == max(nx.single_source_shortest_path_length(graph, owner).values())
        for end, carries in zip(far.tolist(), tree.carries.tolist(), strict=True):
            assert carries == len(nx.descendants(graph, end)) + 1


@pytest.mark.parametrize(
    ("collective", "owner"),
    [
        ("all-reduce", "owner, where the sum is complete"),
        ("reduce-scatter", "owner, where the sum is complete"),
        ("all-gather", "owner, where the chunk comes from"),
        ("all-reduce-with-update", "owner, where the sum is complete and may be replaced"),
    ],
)
def test_every_collective_has_trees_that_say_what_an_owner_is(collective: str, owner: str) -> None:
    schedule = plan(Mesh("4x4", failed=["2x2@2,2"]), "weave", chunks=24, collective=collective)
    picture = figure(schedule, "trees", chunks=[3])
    assert sum(n_heads(picture, name) for name in schedule.phase_names) == schedule.mesh.n_chips - 1
    assert owner in [text.get_text() for legend in picture.legends for text in legend.get_texts()]
    assert_legible(picture)


def test_trees_are_drawn_with_one_arrow_a_chip() -> None:
    schedule = plan(Mesh("8x8", failed=["2x2@2,2"]), "row-pairs")
    picture = figure(schedule, "trees", chunks=[5])
    assert sum(n_heads(picture, name) for name in schedule.phase_names) == schedule.mesh.n_chips - 1
    (star,) = named(picture, "owner")
    column, row = star.get_xydata()[0]
    assert schedule.mesh.rank((round(row), round(column))) == schedule.owners[5]
    assert_legible(picture)
    assert len(figure(schedule, "trees").axes) == 4
    with pytest.raises(DrawingError, match="There is no chunk 96: the schedule has chunks 0 to 95"):
        figure(schedule, "trees", chunks=[96])
    with pytest.raises(DrawingError, match="holds 1 to 12 trees: got 13"):
        figure(schedule, "trees", chunks=range(13))


def test_more_routes_than_the_legend_holds() -> None:
    mesh = Mesh("12x12", failed=["2x2@4,4"])
    picture = draw_routes(mesh, list(range(20)), list(range(100, 120)))
    names = {str(artist.get_label()).removesuffix(": heads") for artist in picture.axes[0].get_children()}
    assert sum(n_heads(picture, name) for name in names) == 20
    assert any("and 5 more" in text.get_text() for legend in picture.legends for text in legend.get_texts())
    assert_legible(picture)


def test_results_that_take_other_ways_back_get_their_own_panel() -> None:
    mesh = Mesh("1x3")
    schedule = Schedule(
        mesh,
        total_chunks=1,
        step=[0, 1, 2, 3],
        src=[0, 1, 2, 2],
        dst=[1, 2, 0, 1],
        op=[Op.REDUCE, Op.REDUCE, Op.COPY, Op.COPY],
        phase=[0, 0, 1, 1],
        phase_names=("in", "out"),
        owners=[2],
    )
    picture = figure(schedule)
    assert len(picture.axes) == 2
    assert n_heads(picture, "in") == 2
    assert n_heads(picture, "out") == 2
    assert not any("same lines" in text.get_text() for text in picture.texts)
    assert any("same lines" in text.get_text() for text in figure(plan(Mesh("4x4"), "hamiltonian")).texts)


@pytest.mark.parametrize("shape", ["7", "2x3x4", "3x2x2x2"])
def test_other_dimensions_are_drawn_in_planes(shape: str) -> None:
    mesh = Mesh(shape)
    ranks = np.arange(mesh.n_chips)
    a, b = mesh.cables.T
    parents = {int(y): int(x) for x, y in zip(a, b, strict=True)}
    order = sorted(parents, key=lambda rank: -rank)
    schedule = Schedule(
        mesh,
        total_chunks=1,
        step=ranks[: len(order)],
        src=order,
        dst=[parents[rank] for rank in order],
        op=Op.REDUCE,
        owners=[0],
        phase_names=("reduce to the root",),
    )
    for what in ("rings", "trees", "load"):
        assert_legible(figure(schedule, what))
    assert n_heads(figure(schedule, "trees"), "reduce to the root") == mesh.n_chips - 1


def test_a_torus_and_failed_cables_are_drawn() -> None:
    torus = figure(plan(Mesh("4x6", wrap=True), "two-color"))
    assert any("opposite edge" in text.get_text() for text in torus.texts)
    assert_legible(torus)
    cut = figure(plan(Mesh("8x8", failed_cables=["6,2-7,2"]), "hamiltonian"))
    (cross,) = named(cut, "broken")
    assert cross.get_xydata().tolist() == [[2, 6.5]]
    assert_legible(cut)


def test_a_failed_wrap_cable_is_not_marked_on_a_live_one() -> None:
    layout = FigureLayout(Mesh("1x6", wrap=True, failed_cables=["0,0-0,5"]))
    assert all(not 0 <= x <= 5 for x, _ in failed_cable_marks(layout))
    cube = FigureLayout(Mesh("2x2x2", failed_cables=["0,0,0-1,0,0"]))
    (mark,) = failed_cable_marks(cube)
    ends = cube.positions[[0, 4]]
    assert np.isclose(mark[0], ends[:, 0].mean())
    assert mark[1] != ends[0, 1], "on the arc between planes"
    (crosses,) = named(figure(plan(layout.mesh, "weave", chunks=6), "rings"), "broken")
    assert len(crosses.get_xdata()) == 2


def test_a_schedule_without_transfers_is_a_picture_of_its_mesh() -> None:
    schedule = Schedule(Mesh("1x1"), total_chunks=1, step=[], src=[], dst=[], op=[], owners=[0])
    picture = figure(schedule)
    assert len(named(picture, "chips")[0].get_offsets()) == 1


def test_a_32x32_svg_stays_small(tmp_path: Path) -> None:
    schedule = plan(Mesh("32x32", failed=["4x2@6,8"]), "row-pairs", verify=False)
    drawing = draw(schedule, tmp_path / "picture.svg", "rings")
    assert drawing.n_bytes < 5_000_000


# Machado, Oliveira and Fernandes (2009), severity 1, in linear RGB.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def seen(colour: str, matrix: list[list[float]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """CIELAB of a colour as somebody with that blindness sees it."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(matrix) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ratio = np.array(to_xyz) @ linear / [0.9505, 1.0, 1.089]
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("planner", ["row-pairs", "two-color"])
def test_colour_blind_readers_can_tell_the_lines_apart(planner: str, blindness: str) -> None:
    failed = ["2x2@2,2"] if planner == "row-pairs" else []
    looks = phase_looks(plan(Mesh("8x8", failed=failed), planner))
    colours = sorted({look.colour for look in looks})
    assert len(colours) >= 2
    for one in colours:
        for other in colours:
            if one < other:
                assert np.linalg.norm(seen(one, BLINDNESS[blindness]) - seen(other, BLINDNESS[blindness])) > 20
    assert np.linalg.norm(seen(RED, BLINDNESS[blindness]) - seen(YELLOW, BLINDNESS[blindness])) > 20
    # What adds and what copies differ without any colour.
    assert {(look.dash, look.open_head) for look in looks if look.open_head}.isdisjoint(
        (look.dash, look.open_head) for look in looks if not look.open_head
    )
