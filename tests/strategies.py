"""Hypothesis strategies: meshes in any state of repair."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from meshmend import Mesh

SMALL_SHAPES = st.one_of(
    st.tuples(st.integers(1, 40)),
    st.tuples(st.integers(1, 16), st.integers(1, 16)),
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)),
)


def tear(shape: tuple[int, ...], wrap: tuple[bool, ...], lost_chips: float, lost_cables: float, seed: int) -> Mesh:
    """Fail chips and cables at random, and with them all chips that are cut off from the largest part."""
    chance = np.random.default_rng(seed)
    dead = chance.random(shape) < lost_chips
    dead.flat[chance.integers(dead.size)] = False
    mesh = Mesh(shape, wrap=wrap, failed=[tuple(map(int, chip)) for chip in np.argwhere(dead)])
    cut = mesh.cables[chance.random(mesh.n_cables) < lost_cables]
    cables = [(mesh.chip(int(a)), mesh.chip(int(b))) for a, b in cut]
    mesh = Mesh(shape, wrap=wrap, failed=mesh.holes, failed_cables=cables)
    largest = np.bincount(mesh.component_of).argmax()
    lost = np.flatnonzero(mesh.component_of != largest)
    return Mesh(shape, wrap=wrap, failed=[*mesh.holes, *(mesh.chip(int(rank)) for rank in lost)], failed_cables=cables)


@st.composite
def torn_meshes(draw: st.DrawFn) -> Mesh:
    """Draw a connected mesh or torus of one to three axes that has lost up to a third of its chips and cables."""
    shape = draw(SMALL_SHAPES)
    wrap = tuple(draw(st.booleans()) for _ in shape)
    lost = st.sampled_from([0.0, 0.02, 0.1, 0.33])
    return tear(shape, wrap, draw(lost), draw(lost), draw(st.integers(0, 2**32 - 1)))
