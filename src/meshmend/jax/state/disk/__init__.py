"""Checkpoints of a state on disk."""

__all__: list[str] = []
