"""Payloads as people write them, and the least time of an all-reduce in units of M/b."""

from __future__ import annotations

import re

import numpy as np

from meshmend.errors import ParameterError
from meshmend.topology import Mesh

_SCALE = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    """Read a payload: `32MB`, `1.5GB`, `64MiB`.

    >>> parse_bytes("32MB"), parse_bytes("64KiB")
    (32000000, 65536)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in _SCALE or not float(match[1]):
        raise ParameterError(f"{text!r} is not a payload. Write it as in 32MB or 64MiB.")
    return round(float(match[1]) * _SCALE[match[2]])


def least_units(mesh: Mesh) -> float:
    """Return the least time of any all-reduce in units of M/b: max(1/λ, (P − 1)/E).

    λ is the number of cables that must go before the mesh falls apart, E the number of cables.

    >>> least_units(Mesh("4x4"))
    0.625
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import maximum_flow

    if mesh.n_chips == 1:
        return 0.0
    a, b = mesh.cables.T
    ends = (np.concatenate([a, b]), np.concatenate([b, a]))
    graph = coo_array((np.ones(2 * len(a), np.int32), ends), shape=(mesh.n_chips, mesh.n_chips)).tocsr()
    connectivity = min(int(maximum_flow(graph, 0, other).flow_value) for other in range(1, mesh.n_chips))
    return max(1 / connectivity, (mesh.n_chips - 1) / mesh.n_cables)
