"""Which samples a step uses."""

__all__: list[str] = []
