from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given

from meshmend import Mesh
from meshmend.bench.units import least_units, parse_bytes
from meshmend.errors import ParameterError
from strategies import meshes


def test_the_bounds_of_the_design() -> None:
    assert least_units(Mesh("4x4")) == 15 / 24
    assert least_units(Mesh("16x32", failed=["4x2@6,8"])) == pytest.approx(0.527, abs=0.001)
    assert least_units(Mesh("32x32", failed=["4x2@6,8"])) == pytest.approx(0.517, abs=0.001)
    assert least_units(Mesh("1x4")) == 1
    assert least_units(Mesh("1x1")) == 0


@given(meshes(max_axes=2, max_side=4, connected=True))
def test_connectivity_is_networkxs(mesh: Mesh) -> None:
    graph: nx.Graph[int] = nx.Graph(mesh.cables.tolist())
    if mesh.n_chips > 1:
        wanted = max(1 / nx.edge_connectivity(graph), (mesh.n_chips - 1) / mesh.n_cables)
        assert least_units(mesh) == pytest.approx(wanted)


def test_payloads() -> None:
    assert parse_bytes("32MB") == 32_000_000
    assert parse_bytes("1.5 gib") == 1.5 * 2**30
    for text in ("", "MB", "32 parsecs", "-1MB", "0"):
        with pytest.raises(ParameterError, match="is not a payload"):
            parse_bytes(text)
