"""Topology: which chips there are, which have failed, and which cables join the survivors.

Everything is stored in arrays, never in one object per chip, so that a 512×512 mesh costs milliseconds.

Numbering. A chip is named by its coordinate; a *rank* is its position among the live chips in row-major order.
A *direction* is `2 * axis` towards larger coordinates and `2 * axis + 1` towards smaller ones, so that in 2-D
0 is south, 1 north, 2 east, 3 west. A *link* (one direction of a cable) is `rank * n_directions + direction`
of the chip that it leaves.
"""

from meshmend.topology.mesh import MAX_AXES, MAX_CHIPS, IntArray, Mesh
from meshmend.topology.rates import name_cable_rates, parse_cable_rate
from meshmend.topology.region import Region, all_placements
from meshmend.topology.text import Cable, name_cable, name_shape, parse_chip, parse_shape, parse_wrap
from meshmend.topology.tiles import Tiling, cut_into_tiles

__all__ = [
    "MAX_AXES",
    "MAX_CHIPS",
    "Cable",
    "IntArray",
    "Mesh",
    "Region",
    "Tiling",
    "all_placements",
    "cut_into_tiles",
    "name_cable",
    "name_cable_rates",
    "name_shape",
    "parse_cable_rate",
    "parse_chip",
    "parse_shape",
    "parse_wrap",
]
