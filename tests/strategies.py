"""Hypothesis strategies, all in one place; grown with every feature."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from meshmend import Mesh, Region


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 3, max_side: int = 6, connected: bool = False) -> Mesh:
    """Any mesh or torus with random failed chips and cables."""
    shape = draw(st.lists(st.integers(1, max_side), min_size=1, max_size=max_axes).map(tuple))
    wrap = draw(st.tuples(*(st.booleans() for _ in shape)))
    chip = st.tuples(*(st.integers(0, n - 1) for n in shape))
    whole = Mesh(shape, wrap=wrap)
    failed = draw(st.lists(chip, max_size=min(5, whole.size - 1), unique=True))
    mesh = Mesh(shape, wrap=wrap, failed=failed)
    cables = [tuple(mesh.chip(int(end)) for end in cable) for cable in mesh.cables]
    lost: list[Any] = draw(st.lists(st.sampled_from(cables), max_size=3)) if cables else []
    mesh = Mesh(shape, wrap=wrap, failed=failed, failed_cables=lost)
    if connected and not mesh.is_connected:
        # Keep the part of the first chip: filtering would throw most small meshes away.
        rest = mesh.coords[mesh.component_of != mesh.component_of[0]]
        mesh = mesh.fail(*(tuple(map(int, chip)) for chip in rest))
    return mesh


@st.composite
def block_meshes(draw: st.DrawFn, max_blocks: int = 5) -> Mesh:
    """A 2-D mesh of 2×2 blocks, some of which have failed: what the ring planners are for."""
    rows, columns = draw(st.integers(1, max_blocks)), draw(st.integers(1, max_blocks))
    block = st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1))
    dead = draw(st.lists(block, max_size=min(4, rows * columns - 1), unique=True))
    holes = [Region(at=(2 * r, 2 * c), shape=(2, 2)) for r, c in dead]
    return Mesh((2 * rows, 2 * columns), failed=holes)


@st.composite
def battered_meshes(draw: st.DrawFn, max_side: int = 12) -> Mesh:
    """The largest connected part of a 2-D mesh with up to a third of its chips and cables failed, at random."""
    shape = (draw(st.integers(1, max_side)), draw(st.integers(1, max_side)))
    share = draw(st.sampled_from([0.02, 0.1, 0.33]))
    random = draw(st.randoms(use_true_random=False))
    chips = [(r, c) for r in range(shape[0]) for c in range(shape[1])]
    failed = [chip for chip in chips[1:] if random.random() < share]
    whole = Mesh(shape, failed=failed)
    cables = [(whole.chip(int(a)), whole.chip(int(b))) for a, b in whole.cables]
    mesh = Mesh(shape, failed=failed, failed_cables=[cable for cable in cables if random.random() < share / 2])
    sizes = [int((mesh.component_of == part).sum()) for part in range(mesh.n_components)]
    rest = mesh.coords[mesh.component_of != sizes.index(max(sizes))]
    return mesh.fail(*(tuple(map(int, chip)) for chip in rest))
