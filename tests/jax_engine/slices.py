"""Devices that look like those of a TPU slice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FakeTpu:
    """As much of a TPU device as `discover` looks at."""

    coords: tuple[int, ...]
    core_on_chip: int = 0
    device_kind: str = "TPU v3"
    platform: str = "tpu"


def slice_of(
    shape: tuple[int, ...], *, cores: int = 1, at: tuple[int, ...] = (0, 0, 0), kind: str = "TPU v3"
) -> list[FakeTpu]:
    """Devices in JAX's order, x fastest, at an offset in the pod; coordinates have three axes always."""
    x, y, z = (*shape, 1)[:3]
    return [
        FakeTpu((i + at[0], j + at[1], k + at[2]), core, kind)
        for k in range(z)
        for j in range(y)
        for i in range(x)
        for core in range(cores)
    ]
