"""Orbax without meshmend, in a process of its own: reads checkpoints of jobs, and writes what jobs start from.

Called with a file that has pairs of paths: each tree is read from the first, and written to the second with 1 added to
every array. What was read is beside the second, as .npz, by the names of the arrays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


def name_of(path: tuple[object, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path)


def main() -> None:
    reader = ocp.StandardCheckpointer()
    for source, target in json.loads(Path(sys.argv[1]).read_text()):
        tree = reader.restore(source)
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        # NumPy's files have no bfloat16: its bits are enough, and so is its name.
        arrays = {name_of(path): np.asarray(leaf) for path, leaf in leaves}
        bits: dict[str, Any] = {
            f"{name} {a.dtype.name}": np.frombuffer(a.tobytes(), np.uint8) for name, a in arrays.items()
        }
        shapes = {f"{name} shape": np.array(a.shape, int) for name, a in arrays.items()}
        found: dict[str, Any] = bits | shapes
        np.savez(f"{target}.npz", **found)
        new = jax.tree.map(lambda leaf: leaf + np.ones((), leaf.dtype), tree)
        new = jax.tree.map(lambda leaf: leaf if leaf.size else None, new)  # Orbax refuses arrays without elements
        reader.save(target, new)
        reader.wait_until_finished()
    assert not any(name.split(".")[0] == "meshmend" for name in sys.modules)


if __name__ == "__main__":
    main()
