"""Compiling for TPUs that are not here: the real TPU compiler (`libtpu`) needs no TPU, only the shape of a slice.

`compile_for` compiles the all-reduce of a plan for the live chips of a slice and reports what the compiler made of
it. That shows that the compiler accepts a plan for its machine, and what it costs in code and memory.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshmend.errors import MeshmendError, ParameterError
from meshmend.extras import install_hint
from meshmend.jax.engine.collectives import all_reduce
from meshmend.jax.engine.compiler_options import dump_options, unknown_option, without_option
from meshmend.jax.engine.fabric import Fabric, discover
from meshmend.jax.engine.program import Program, abstract_program
from meshmend.schedule import Schedule
from meshmend.topology import Region

SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v3-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What libtpu would otherwise query from a cloud machine; and several compilers may run at once: none uses a TPU.

All of it must be set before libtpu is loaded."""


class CompilerError(MeshmendError):
    """The TPU compiler is missing or rejects the program. Fields: `topology`, `why`, `advice`."""

    def __init__(self, topology: str, why: str, advice: str = "") -> None:
        self.topology = topology
        self.why = why
        self.advice = advice
        super().__init__(f"Cannot compile for {topology}: {why} {advice}".rstrip())


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a program, for one chip. All sizes are in bytes, HLO sizes in characters."""

    topology: str
    device_kind: str
    chips: int
    cores_per_chip: int
    loops: int
    lanes: int
    permutes: int
    """Collective permutes in the compiled code, an asynchronous pair counted once."""
    other_collectives: int
    in_flight: int
    """Most permutes that have started before one is waited for: how many links a chip drives at once."""
    hlo_chars: int
    hlo_chars_without_pairs: int
    """Size of the code apart from the lists of source-target pairs, which name every chip."""
    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    aliased_bytes: int
    peak_bytes: int
    """Most that is in use at once, arguments included."""
    flops: float
    accessed_bytes: float
    estimated_seconds: float
    """The compiler's own estimate of a run. It counts the body of a loop once, so it leaves out most of the steps."""
    lower_seconds: float
    compile_seconds: float


def has_libtpu() -> bool:
    """Whether the TPU compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None


def slice_fabric(
    topology: str,
    *,
    failed: Iterable[Region | Sequence[int] | str] = (),
    wrap: bool | Sequence[bool] | None = None,
    cores: int | None = None,
) -> Fabric:
    """Return the fabric of a TPU slice such as "v3:32x32" that is not here, without the failed chips.

    `cores=1` uses one core of each chip, where a chip has two (v2, v3, and v4 without megacore).
    """
    from jax.experimental import topologies

    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if not re.fullmatch(r"v\d+\w*:\d+(x\d+)+", topology, re.ASCII):
        raise ParameterError(f"{topology!r} is not a TPU slice. Write generation:shape, as in v3:32x32 or v4:4x4x8.")
    try:
        devices = topologies.get_topology_desc(topology, platform="tpu").devices
    except (RuntimeError, ValueError) as error:
        if not has_libtpu():
            raise CompilerError(topology, "libtpu is not installed.", f"{install_hint('tpu')}.") from error
        raise CompilerError(topology, f"libtpu does not support it ({_first_line(error)}).") from error
    if cores is not None:
        devices = [device for device in devices if getattr(device, "core_on_chip", 0) < cores]
    return discover(devices, failed=list(failed), wrap=wrap)


def compile_for(
    topology: str, schedule: Schedule, fabric: Fabric, *, payload_bytes: int, dtype: DTypeLike = jnp.float32
) -> Compiled:
    """Compile the schedule's all-reduce of `payload_bytes` per device for a slice, and report on it."""
    program = abstract_program(schedule, fabric)
    by_device = PartitionSpec(fabric.axes)
    itemsize = jnp.dtype(dtype).itemsize
    size = max(1, -(-payload_bytes // itemsize))
    n_devices = int(fabric.jax_mesh.devices.size)
    payload = jax.ShapeDtypeStruct((n_devices * size,), dtype, sharding=fabric.sharding(fabric.axes))
    mapped = jax.shard_map(
        all_reduce, mesh=fabric.jax_mesh, in_specs=(by_device, program.spec), out_specs=by_device, check_vma=False
    )
    return compile_step(topology, fabric.jit(mapped, donate_argnums=0), fabric, payload, program)[0]


def compile_step(topology: str, jitted: Any, fabric: Fabric, *arguments: Any) -> tuple[Compiled, Any]:
    """Compile any jitted function that takes abstract arguments on `fabric`; also returns JAX's compiled object.

    Its own options, as `fabric.jit(…, overlap=True)` gives them where communication is to hide, count as well.
    """
    started = time.perf_counter()
    lowered = jitted.lower(*arguments)
    lower_seconds = time.perf_counter() - started
    started = time.perf_counter()
    with TemporaryDirectory(prefix="meshmend-") as dump:
        given = {**fabric.compiler_options, **dump_options(Path(dump))}
        with as_compiler_error(topology), warnings.catch_warnings():
            # JAX's cache keeps what was compiled for a slice, and cannot load it where there is none.
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
            compiled = lowered.compile(compiler_options=given)
        compile_seconds = time.perf_counter() - started
        text = _text_of(compiled, Path(dump))
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    leaves = jax.tree.leaves(arguments, is_leaf=lambda value: isinstance(value, Program))
    programs = [leaf for leaf in leaves if isinstance(leaf, Program)]
    lanes = [loop for program in programs for one in program.phases for loop in one.layout.shape.lanes]
    device = fabric.jax_mesh.devices.flat[0]
    permutes, others = count_collectives(text)
    report = Compiled(
        topology=topology,
        device_kind=str(device.device_kind),
        chips=fabric.mesh.n_chips,
        cores_per_chip=fabric.jax_mesh.shape[fabric.core_axis] if fabric.core_axis else 1,
        loops=len(lanes),
        lanes=max((len(loop) for loop in lanes), default=0),
        permutes=permutes,
        other_collectives=others,
        in_flight=most_in_flight(text),
        hlo_chars=len(text),
        hlo_chars_without_pairs=len(without_pairs(text)),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        flops=float(cost["flops"]),
        accessed_bytes=float(cost["bytes accessed"]),
        estimated_seconds=float(cost.get("optimal_seconds", float("nan"))),
        lower_seconds=lower_seconds,
        compile_seconds=compile_seconds,
    )
    return report, compiled


def _text_of(compiled: Any, dump: Path) -> str:
    """Return the compiled code, from the compiler's own dump where JAX cannot read it back.

    The v6e compiler (libtpu 0.0.51) leaves lookups in large tables to the SparseCores, as asynchronous operations in a
    form that JAX 0.10.2 refuses: "async-update instruction should have 1 operands but sees 3".
    """
    try:
        return str(compiled.as_text())
    except jax.errors.JaxRuntimeError:
        dumped = sorted(dump.glob("*.after_optimizations.txt"), key=lambda path: path.stat().st_size)
        if not dumped:
            raise
        return dumped[-1].read_text(encoding="utf-8")  # smaller ones are kernels that were compiled by themselves


def count_collectives(hlo: str) -> tuple[int, int]:
    """Count the permutes and the other collectives in compiled code; an asynchronous pair counts once."""
    permutes = len(re.findall(r" collective-permute(?:-start)?\(", hlo))
    others = r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-broadcast)(?:-start)?\("
    return permutes, len(re.findall(others, hlo))


def most_in_flight(hlo: str) -> int:
    """Return how many permutes have started, at most, before one of them is waited for."""
    most = flying = 0
    for line in hlo.splitlines():
        if re.search(r" collective-permute-start\(", line):
            flying += 1
            most = max(most, flying)
        elif re.search(r" collective-permute-done\(", line):
            flying -= 1
        elif re.search(r" collective-permute\(", line):
            most = max(most, 1)
        elif line.startswith("}"):
            flying = 0
    return most


def without_pairs(hlo: str) -> str:
    """Return compiled code without the lists that name every chip, and without the names of source files."""
    hlo = re.sub(r"source_target_pairs=\{[{}\d,]*\}", "", hlo)
    hlo = re.sub(r"replica_groups=(\{[{}\d,]*\}|\[[^\s]*)", "", hlo)
    return re.sub(r"metadata=\{[^}]*\}", "", hlo)


@contextmanager
def as_compiler_error(topology: str) -> Iterator[None]:
    """Raise a `CompilerError` that says what to do in place of the compiler's own."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "limited ICI routing" in message:
            raise CompilerError(
                topology,
                "its compiler refuses programs that leave out chips (limited ICI routing).",
                "On this generation a job with a hole has to restart on a smaller slice; v2, v3, v4, v5p and v6e work.",
            ) from error
        unknown = unknown_option(message)
        if unknown is not None:
            raise CompilerError(
                topology,
                f"the compiler ({_libtpu_version()}) does not know the option {unknown}.",
                without_option(unknown),
            ) from error
        raise CompilerError(topology, f"the compiler refuses: {_first_line(error)}") from error


def _libtpu_version() -> str:
    return f"libtpu {metadata.version('libtpu')}" if has_libtpu() else "libtpu is not installed"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
