"""What hosts have observed of each other."""

from __future__ import annotations

from meshmend.quarantine import Observation, Suspect


def signs_against(name: str, number: int) -> list[Observation]:
    """Two separate observations: a replica that differs, and a wrong sum afterwards."""
    who, step = (Suspect.parse(name),), 10 + 2 * number
    return [
        Observation("digest", who, step, "differs", {"agree": 15, "differ": 1, "chunk": 0}),
        Observation("recompute", who, step + 1, "the sum of chunk 0 is wrong"),
    ]
