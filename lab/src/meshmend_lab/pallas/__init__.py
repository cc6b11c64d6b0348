"""A plan as one Pallas kernel per chip, with remote DMAs between neighbours and no common steps. No TPU has run it.

`engine` has its `install` and `all_reduce`, `instructions` what each chip does, and `kernel` what follows them.
"""

__all__: list[str] = []
