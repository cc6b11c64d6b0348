"""How a state lies on devices, in copies and on disk."""

__all__: list[str] = []
