"""Checkpoints of a state on disk: ordinary Orbax checkpoints, which any mesh and any program can read.

`background` begins them while the job trains on, `write` and `read` move the chunks that a host owns, and `disk` is
the part that the keeper calls.
"""

__all__: list[str] = []
