"""Shapes in signatures: letters that are known, where arrays cross a boundary."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import meshmend
from meshmend.schedule import Schedule

SOURCE = Path(meshmend.__file__).parent
PAGE = Path(__file__).parents[1] / "docs/walk.md"
DTYPES = {"", "int32", "uint8", "uint32", "float32"}
BOUNDARIES = [
    "numpy.py",
    "jax/engine/collectives.py",
    "schedule/lanes.py",
    "jax/engine/program.py",
    "jax/train/part_sums.py",
    "jax/state/layout/state_layout.py",
    "jax/state/memory/collect.py",
    "torch/engine.py",
    "torch/payload.py",
]


def shapes_of(path: Path) -> list[str]:
    """The shapes of all `Annotated[…, "shape"]` in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Annotated":
            assert isinstance(node.slice, ast.Tuple)
            what = node.slice.elts[1]
            if isinstance(what, ast.Constant):  # the command line annotates its options with other things
                found.append(str(what.value))
    return found


def axes_of(shape: str) -> list[str]:
    match = re.fullmatch(r"(\w*)\[(.*)\]", shape)
    assert match is not None, f"expected dtype[axes], as in int32[N, R], got {shape}"
    assert match[1] in DTYPES
    return [axis for axis in match[2].split(", ") if axis and not axis.isdigit()]


def test_shapes_use_the_letters_that_are_named_in_one_place_and_all_of_them() -> None:
    used = {axis for path in SOURCE.rglob("*.py") for shape in shapes_of(path) for axis in axes_of(shape)}
    table = PAGE.read_text(encoding="utf-8").partition("## Letters of axes")[2].partition("\n#")[0]
    assert used - {"..."} == set(re.findall(r"^\| `(\w)` \|", table, re.M))


def test_arrays_that_cross_a_boundary_say_their_shape() -> None:
    assert [name for name in BOUNDARIES if not shapes_of(SOURCE / name)] == []


def test_the_tables_of_a_lowered_schedule_have_the_shapes_that_they_say() -> None:
    pytest.importorskip("jax")
    from meshmend.schedule.lanes import Loop, lower

    schedule: Schedule = meshmend.plan(meshmend.Mesh("4x4", failed=["2x2@0,0"]), "row-pairs")
    lowered = lower(schedule)
    owns = np.bincount(schedule.owners, minlength=12)
    sizes = {"N": 12, "R": int(owns.max())}
    for loop in lowered.loops:
        sizes |= {"T": loop.n_steps, "L": len(loop.lanes)}
        for field in ("send", "receive", "ops"):
            (shape,) = re.findall(r"['\"](.*)['\"]", str(Loop.__annotations__[field]))
            table = getattr(loop, field)
            assert table.shape == tuple(sizes[axis] for axis in axes_of(shape))
            assert shape.startswith(table.dtype.name)
    assert lowered.owned.shape == (sizes["N"], sizes["R"])
