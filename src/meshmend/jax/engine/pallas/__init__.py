"""The second engine: a schedule as one kernel per chip, with remote DMAs between neighbours. No TPU has run it."""

__all__: list[str] = []
