"""Measurements on real processes: allreduce times on a mesh of this machine, and survival of killed chips."""

__all__: list[str] = []
