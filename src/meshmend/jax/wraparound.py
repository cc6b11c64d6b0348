"""Which axes of a TPU slice wrap, as documented: the table and its sources are in `meshmend.machines.wiring`.

JAX's devices have coordinates, and say nothing about cables; `discover(…, wrap=…)` overrides what is documented.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from meshmend.machines.wiring import documented_axes


def documented_wrap(kind: str, shape: Sequence[int]) -> tuple[bool, ...]:
    """Return which axes of a slice wrap. Warns where that is not known, and then leaves cables out.

    A plan without a cable that exists leaves it unused; a plan with a cable that does not exist is slower than
    predicted. So an unknown axis does not wrap.

    >>> documented_wrap("TPU v4", (4, 4, 4)), documented_wrap("TPU v5e", (8, 16))
    ((True, True, True), (False, True))
    """
    wrap, doubt = documented_axes(kind, shape)
    if doubt is not None:
        warnings.warn(
            f"{doubt}. Give discover(…, wrap=…) or MESHMEND_WRAP (all, none, or axes as in 0,1) if you know better.",
            stacklevel=5,
        )
    return wrap
