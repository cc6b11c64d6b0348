"""Which axes of a TPU slice wrap: what Google documents, per kind of device and shape of the slice, in one table.

No public interface reports it: JAX's devices have coordinates, and nothing about cables. We have checked none of this
on a TPU; `discover(…, wrap=…)` overrides it. Sources:

- v2, v3: pods are 2-D tori, 16×16 and 32×32 chips (Jouppi et al., "A Domain-Specific Supercomputer for Training Deep
  Neural Networks", 2020; cloud.google.com/tpu/docs/v2 and /v3). A slice is cut out of a pod, so only a whole pod wraps.
- v4, v5p: cubes of 4×4×4 chips, joined and wrapped by optical switches. "Any multiple of a full cube (e.g. 4x4x4 or
  4x4x8) will have wraparounds", a smaller slice has none (jax-ml.github.io/scaling-book/tpus; Jouppi et al., "TPU v4:
  An Optically Reconfigurable Supercomputer", 2023).
- v4, v5p, twisted: slices of k×k×2k and k×2k×2k chips can be twisted tori (docs.cloud.google.com/tpu/docs/v4, "3D mesh
  and 3D torus", and /v5p, "Supports twisted?"). Leaving through the end of a short axis then leads to the other half
  of the long ones. The devices do not say which it is, so only the long axes, which wrap either way, count.
- v5e, v6e: a pod is a 2-D torus of 16×16, "with wraparounds along any axis of size 16" (the same book).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from meshmend.topology import name_shape


@dataclass(frozen=True)
class Wiring:
    """When the axes of a slice wrap; one of the fields is set."""

    pod: tuple[int, ...] = ()
    """All axes do, if the slice is this whole pod."""
    full_axis: int = 0
    """An axis does, if it has this length."""
    cube: int = 0
    """All axes do, if the slice has three and consists of whole cubes with this edge."""


WIRING = {
    "TPU v2": Wiring(pod=(16, 16)),
    "TPU v3": Wiring(pod=(32, 32)),
    "TPU v4": Wiring(cube=4),
    "TPU v5": Wiring(cube=4),
    "TPU v5p": Wiring(cube=4),
    "TPU v5 lite": Wiring(full_axis=16),
    "TPU v5e": Wiring(full_axis=16),
    "TPU v6 lite": Wiring(full_axis=16),
    "TPU v6e": Wiring(full_axis=16),
}
"""By JAX's `device_kind`."""


def documented_wrap(kind: str, shape: Sequence[int]) -> tuple[bool, ...]:
    """Return which axes of a slice wrap. Warns where that is not known, and then leaves cables out.

    A plan without a cable that exists leaves it unused; a plan with a cable that does not exist is slower than
    predicted. So an unknown axis does not wrap.

    >>> documented_wrap("TPU v4", (4, 4, 4)), documented_wrap("TPU v5e", (8, 16))
    ((True, True, True), (False, True))
    """
    shape = tuple(shape)
    wiring = WIRING.get(kind)
    if wiring is None:
        _warn(f"It is not known here how {kind} devices are wired, so no axis of {name_shape(shape)} wraps")
        return (False,) * len(shape)
    if wiring.cube and len(shape) == 3 and not any(n % wiring.cube for n in shape):
        short, long = min(shape), max(shape)
        if long == 2 * short and set(shape) == {short, long}:
            _warn(
                f"A {kind} slice of {name_shape(shape)} chips may be a twisted torus, which is not known here, so only "
                "its long axes wrap"
            )
            return tuple(n == long for n in shape)
        return (True, True, True)
    return tuple(shape == wiring.pod or n == wiring.full_axis for n in shape)


def _warn(what: str) -> None:
    warnings.warn(
        f"{what}. Give discover(…, wrap=…) or MESHMEND_WRAP (all, none, or axes as in 0,1) if you know better.",
        stacklevel=6,
    )
