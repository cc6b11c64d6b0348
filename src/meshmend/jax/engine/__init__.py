"""Run a schedule on the devices of a fabric."""

__all__: list[str] = []
