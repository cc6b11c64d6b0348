"""Copies of a state in the memory of hosts."""

__all__: list[str] = []
