"""Times on your own chips: all-reduces on JAX's devices, measured beside predicted."""

__all__: list[str] = []
