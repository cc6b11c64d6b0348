"""Measurements on real processes: all-reduce times on a mesh of this machine, and survival of killed chips."""

__all__: list[str] = []
