"""One train step over a fabric."""

__all__: list[str] = []
