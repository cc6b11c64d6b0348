"""The engine "pallas" as a program has it: each chip's instructions on that chip, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from meshmend.cost import Hardware
from meshmend.cost.hardware import PRESETS
from meshmend.errors import ParameterError
from meshmend.jax.engine.pallas.instructions import KernelShape, instructions_of
from meshmend.jax.engine.pallas.update import OwnerUpdate
from meshmend.schedule import Schedule
from meshmend.schedule.lanes import ProgramShape, owned_chunks

Engine = Literal["xla", "pallas"]
ENGINES: tuple[Engine, ...] = ("xla", "pallas")
DTYPES = ("float32", "bfloat16", "int32")
"""What the kernel adds."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class InstalledKernel:
    """A schedule's instructions on their chips; `run` is for one chip, which has its own row of them."""

    words: Annotated[jax.Array, "int32[N, W]"]
    ports: Annotated[jax.Array, "int32[N, V]"]
    shape: KernelShape = field(metadata={"static": True})

    def __str__(self) -> str:
        return f"a kernel of {self.shape.n_instructions} instructions"

    def run(
        self, payload: jax.Array, axis: str, platform: str, update: OwnerUpdate | None = None
    ) -> tuple[jax.Array, ...]:
        """Run it over a matrix of chunks; return that, and the state of an update at the owners."""
        from meshmend.jax.engine.pallas.kernel import run_kernel

        if str(payload.dtype) not in DTYPES:
            raise ParameterError(
                f"engine='pallas' adds {', '.join(DTYPES)}, got {payload.dtype}. Convert the values, give "
                "accumulate_dtype=jnp.float32 if they are narrower, or install with engine='xla'."
            )
        is_tpu = platform == "tpu"
        return run_kernel(payload, self.shape, self.words[0], self.ports[0], update, axis=axis, interpret=not is_tpu)


def kernel_of(
    schedule: Schedule, put: Callable[[NDArray[np.generic]], jax.Array]
) -> tuple[ProgramShape, InstalledKernel]:
    """Return what all chips share of a proven schedule, and its instructions, put where they belong."""
    shape = ProgramShape(
        n_chips=schedule.mesh.n_chips,
        total_chunks=schedule.total_chunks,
        collective=schedule.collective,
        lanes=(),
        owned=tuple(map(tuple, owned_chunks(schedule).tolist())),
    )
    made = instructions_of(schedule)
    return shape, InstalledKernel(put(made.flat_words), put(made.flat_ports), made.shape)


def check_engine(engine: str, update: str) -> None:
    """Refuse an engine that there is not, and what the kernel does not do."""
    if engine not in ENGINES:
        raise ParameterError(f"engine is {engine!r}, expected one of: {', '.join(map(repr, ENGINES))}.")
    if engine == "pallas" and update == "two-phase":
        raise ParameterError(
            "engine='pallas' runs all-reduces, also with a fused update, but no reduce-scatter or all-gather by "
            "itself. Install with update='fused', or with engine='xla'."
        )


def through_kernel(hardware: str | Hardware | None) -> str | Hardware | None:
    """Return the preset of a TPU as the kernel drives it, where there is one, for that of a TPU as XLA does.

    >>> through_kernel("tpu-v6e-xla")
    'tpu-v6e-pallas'
    """
    found = hardware.removesuffix("-xla") + "-pallas" if isinstance(hardware, str) else ""
    return found if found in PRESETS else hardware


def expect_engine(engine: str, installed: Engine) -> None:
    """Refuse a program that was installed for the other engine."""
    check_engine(engine, "")
    if engine != installed:
        raise ParameterError(
            f"engine is {engine!r}, but this program was installed for {installed!r}. Install it with "
            f"mmj.install(schedule, fabric, engine={engine!r})."
        )
