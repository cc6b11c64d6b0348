"""Kinds of TPU: the hardware of each, and which axes of a slice wrap, as Google documents it, in one table.

No public interface reports it: JAX's devices have coordinates, and nothing about cables. We have checked none of this
on a TPU. Sources:

- v2, v3: pods are 2-D tori, 16×16 and 32×32 chips (Jouppi et al., "A Domain-Specific Supercomputer for Training Deep
  Neural Networks", 2020; cloud.google.com/tpu/docs/v2 and /v3). A slice is cut out of a pod, so only a whole pod wraps.
- v4, v5p: cubes of 4×4×4 chips, joined and wrapped by optical switches. "Any multiple of a full cube (e.g. 4x4x4 or
  4x4x8) will have wraparounds", a smaller slice has none (jax-ml.github.io/scaling-book/tpus; Jouppi et al., "TPU v4:
  An Optically Reconfigurable Supercomputer", 2023).
- v4, v5p, twisted: slices of k×k×2k and k×2k×2k chips can be twisted tori (docs.cloud.google.com/tpu/docs/v4, "3D mesh
  and 3D torus", and /v5p, "Supports twisted?"). Leaving through the end of a short axis then leads to the other half
  of the long ones. The devices do not say which it is, so only the long axes, which wrap either way, count.
- 7x: cubes of 4×4×4 chips joined by optical switches, as v5p (docs.cloud.google.com/tpu/docs/tpu7x); twisted slices are
  not documented for it, and are not ruled out either.
- v5e, v6e: a pod is a 2-D torus of 16×16, "with wraparounds along any axis of size 16" (the same book).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshmend.topology import name_shape


@dataclass(frozen=True)
class Wiring:
    """A kind of TPU: its preset, as XLA drives it, and when the axes of a slice wrap, in one of the other fields."""

    hardware: str
    pod: tuple[int, ...] = ()
    """All axes do, if the slice is this whole pod."""
    full_axis: int = 0
    """An axis does, if it has this length."""
    cube: int = 0
    """All axes do, if the slice has three and consists of whole cubes with this edge."""


WIRING = {
    "TPU v2": Wiring("tpu-v2-xla", pod=(16, 16)),
    "TPU v3": Wiring("tpu-v3-xla", pod=(32, 32)),
    "TPU v4": Wiring("tpu-v4-xla", cube=4),
    "TPU v5": Wiring("tpu-v5p-xla", cube=4),
    "TPU v5p": Wiring("tpu-v5p-xla", cube=4),
    "TPU7x": Wiring("tpu-v7x-xla", cube=4),
    "TPU v5 lite": Wiring("tpu-v5e-xla", full_axis=16),
    "TPU v5e": Wiring("tpu-v5e-xla", full_axis=16),
    "TPU v6 lite": Wiring("tpu-v6e-xla", full_axis=16),
    "TPU v6e": Wiring("tpu-v6e-xla", full_axis=16),
}
"""By JAX's `device_kind`."""


def documented_axes(kind: str, shape: Sequence[int]) -> tuple[tuple[bool, ...], str | None]:
    """Return which axes of a slice wrap, and what is not known about it. An unknown axis does not wrap.

    >>> documented_axes("TPU v4", (4, 4, 4)), documented_axes("TPU v5e", (8, 16))
    (((True, True, True), None), ((False, True), None))
    """
    shape = tuple(shape)
    wiring = WIRING.get(kind)
    if wiring is None:
        return (False,) * len(shape), (
            f"It is not known here how {kind} devices are wired, so no axis of {name_shape(shape)} wraps"
        )
    if wiring.cube and len(shape) == 3 and not any(n % wiring.cube for n in shape):
        short, long = min(shape), max(shape)
        if long == 2 * short and set(shape) == {short, long}:
            return tuple(n == long for n in shape), (
                f"A {kind} slice of {name_shape(shape)} chips may be a twisted torus, which is not known here, so only "
                "its long axes wrap"
            )
        return (True, True, True), None
    return tuple(shape == wiring.pod or n == wiring.full_axis for n in shape), None
