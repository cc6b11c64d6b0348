"""Where each element of a state lies: on devices, in copies in memory, in the user's own arrays, and on disk.

A state has four coordinate systems, and each file here leads from one of them to the next. The example is a bias `b` of
2 elements and weights `w` of 4 × 3. The parameters are replicated. Of the optimizer's state, one array like them is
split by owner, in the plan's chunks: here of 4 elements, 0 and 2 on device 0, 1 and 3 on device 1.

    a part's bytes     share 0       share 1         shards of device 0         shards of device 1
    (in memory)        b0│w0 … w5    b1│w6 … w11     b0 b1 w0 w1│w6 w7 w8 w9    w2 w3 w4 w5│w10 w11 · ·
                       └─────┬────────────┘          └────────────────┬──────────────┘
                             │ Outline.runs (flat)                    │ Outline.runs (flat)
                             ▼                                        ▼
    vectors            "replicated float32"          "sharded 0"
    (the same on       b0 b1│w0 w1 w2 … w11          b0 b1 w0 w1│w2 w3 w4 w5│w6 w7 w8 w9│w10 w11
    every mesh)                                      chunk 0     chunk 1    ┌chunk 2
                                                                            │ StateLayout.rectangles (state_layout)
                                                                            ▼
    rectangles         b0 b1    w0 w1 w2             chunk 2 is w[2:3, 0:3] and w[3:4, 0:1]
    (the user's                 w3 w4 w5                │
    own arrays,                ┌────────┐               │
    user_tree)                 │w6 w7 w8│               │
                               ├──┬─────┘               │
                               │w9│w10 w11              │
                               └──┘                     │ ChunkGrid.chunks_of (rectangles)
                                                        ▼
    chunks on disk     w in chunks of 2 × 3:         both are in the second, w[2:4, 0:3]
    (its own grid)     w[0:2, 0:3], w[2:4, 0:3]

>>> from meshmend.jax.state.layout.flat import Outline, ShardedArray
>>> from meshmend.jax.state.layout.rectangles import ChunkGrid, rectangles
>>> outline = Outline(2, 1, 4, ((0, 2), (1, 3)), {"float32": (2, 12)}, (ShardedArray("float32", 14, 4),), n_shares=2)
>>> list(outline.runs(1, "float32"))  # share 1: (vector, first element of it, first element of the part, length)
[('replicated float32', 1, 0, 1), ('replicated float32', 8, 1, 6)]
>>> list(outline.runs(2, "float32"))  # the shards of device 0
[('sharded 0', 0, 0, 4), ('sharded 0', 8, 4, 4)]
>>> [outline.device_of("sharded 0", element) for element in (0, 4, 8, 12)]  # which writes an element to disk
[0, 1, 0, 1]
>>> boxes = list(rectangles(((0, 4), (0, 3)), 8 - 2, 12 - 2))  # chunk 2 is elements 8 to 12, and w follows 2 of b
>>> boxes
[((2, 3), (0, 3)), ((3, 4), (0, 1))]
>>> [list(ChunkGrid((4, 3), (2, 3)).chunks_of(box)) for box in boxes]
[[1], [1]]

A restart on another mesh has other chunks, owners and parts, and the same vectors; a checkpoint has the user's whole
arrays, so that any program reads it. `tree_signature` says which state it is: paths, shapes and dtypes.
"""

__all__: list[str] = []
