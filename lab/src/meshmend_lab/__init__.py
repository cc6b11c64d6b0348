"""The laboratory of meshmend: how we know what it claims, and what no machine has run yet.

`mesh` makes a mesh of network namespaces on one machine, `bench` runs campaigns on it, `paper` reproduces the paper's
tables and figures, `simgrid` is the referee of predictions, `tenstorrent` asks that runtime which mesh it opens and
writes programs for its devices, `export` writes plans for JAX alone and for torch_tpu, `pallas` runs them as one
kernel per chip, and `studio` serves a page to play with a machine. Its commands are those of `meshmend lab`. It
imports meshmend, and nothing in meshmend imports it.
"""

__all__: list[str] = []
