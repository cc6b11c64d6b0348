"""The axes of arrays that cross a boundary, each with one letter.

Signatures say an array's dtype and axes as JAX prints them: `Annotated[jax.Array, "int32[N, R]"]` is a table with a row
per chip; `"[N, ...]"` has any dtype and any further axes, `"[]"` is a number, and an axis whose length never changes is
that length. `tests/test_shapes.py` holds all of them to the letters below. They are for readers: what the engines are
given they check themselves.
"""

from __future__ import annotations

AXES = {
    "N": "live chips, in order of rank",
    "C": "cores per chip",
    "D": "devices, N × C, core by core and chip by chip",
    "K": "chunks of the payload",
    "n": "elements of a chunk",
    "R": "chunks that a chip has room for: those of the chip that owns most",
    "T": "steps of a loop",
    "L": "lanes of a loop",
    "E": "edges, one per pair of chips that exchange messages",
    "B": "examples of a batch that a device has",
    "H": "examples of a part: half of those that a device has, rounded up",
    "S": "elements of a whole array or payload, flat",
    "P": "elements of a part of the state, flat",
    "M": "parts of the state that a device cuts for a copy",
    "I": "devices of a tile; one where chips are not cut into tiles",
    "Q": "pieces of the parameters, each with a digest",
}
