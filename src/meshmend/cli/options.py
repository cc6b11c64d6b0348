"""The options that commands share, singly and in bundles of related ones.

A bundle is a dataclass whose fields are typer's options. A command takes it as one parameter; typer reads the
signature of a command, so `unbundled` gives it one in which every bundle is replaced by its fields, and rebuilds
the bundles when the command is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from meshmend.cost import DEFAULT_HARDWARE, PRESETS, Hardware, find_hardware
from meshmend.cost.hardware import MODES, Mode
from meshmend.cost.units import parse_bytes
from meshmend.errors import ParameterError
from meshmend.machines import Machine, read_machine
from meshmend.planning import PLANNERS, Auto, Planner, make_planner
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.serialize import load
from meshmend.schedule.verify import ensure_proven
from meshmend.topology import Mesh, parse_cable_rate, parse_wrap
from meshmend.topology.text import is_shape


def option(name: str, metavar: str, text: str, *short: str, **settings: Any) -> Any:
    """Return an option: its name, how its value is written ("" for a flag), what the help says, and a shorter name."""
    return typer.Option(name, *short, metavar=metavar or None, help=text, **settings)


ShapeArgument = Annotated[str, typer.Argument(metavar="SHAPE", help="Chips along each axis, as in 16x32.")]
OptionalPlanArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="SHAPE|FILE",
        help="Chips along each axis, as in 16x32; or a plan that `plan --save` wrote; or --machine.",
        show_default=False,
    ),
]
IntendedOption = Annotated[
    Path | None, option("--intended", "FILE", "The machine as it should be: what it lacks has failed.")
]
FailOption = Annotated[
    list[str] | None, option("--fail", "HxW@r,c", "A hole: rows x columns @ row,column; or one chip r,c. Repeatable.")
]
WrapOption = Annotated[str, option("--wrap", "AXES", "Axes that wrap (torus): none, all, or numbers as in 0,1.")]
CableRateOption = Annotated[
    list[str] | None,
    option(
        "--cable-rate",
        "r,c-r,c=X",
        "A slow cable and its rate, as in 0,4-0,5=1/2; or the cables of a box: 8x1@0,4=0.75. Repeatable.",
    ),
]
MetricsOption = Annotated[
    str | None,
    option("--metrics", "ADDR:PORT", "Address of the job's metrics for Prometheus, read from the store's folder."),
]
JsonOption = Annotated[bool, option("--json", "", "One JSON object instead of a table.")]
PlannerOption = Annotated[
    str,
    option(
        "--planner",
        "NAME[:P=X,…]",
        f"One of: {', '.join(PLANNERS)} (the fastest of them); its parameters after a colon, as in "
        "row-pairs:segments=2 or auto:budget_s=60.",
    ),
]
NeighboursOption = Annotated[
    bool, option("--neighbours-only", "", "Hops between neighbours only: for routers that know no hole.")
]
CollectiveOption = Annotated[str, option("--collective", "NAME", f"The collective: {', '.join(Collective)}.")]
PayloadOption = Annotated[str, option("--payload", "SIZE", "Payload per chip: 102MB, 1.34GB, 64MiB.")]
OptionalPayloadOption = Annotated[
    str | None, option("--payload", "SIZE", "Payload per chip: 102MB, 1.34GB, 64MiB.", show_default="100MB")
]


def hardware_option(default: str) -> Any:
    """Return the option --hardware; the help says what is taken by default."""
    text = (
        f"One of: {', '.join(PRESETS)}; or a file that `doctor --measure` wrote. Other numbers after a colon, as in "
        "tpu-v3:hop_latency_s=2us."
    )
    return option("--hardware", "NAME[:P=X,…]", text, show_default=default)


HardwareOption = Annotated[str | None, hardware_option(DEFAULT_HARDWARE)]
"""What is not given is as the machine's description says: see `MachineOptions.hardware`."""


@dataclass(frozen=True)
class HoleOptions:
    """What has failed, and which axes wrap."""

    fail: FailOption = None
    fail_cable: Annotated[
        list[str] | None, option("--fail-cable", "r,c-r,c", "A failed cable between two neighbours. Repeatable.")
    ] = None
    cable_rate: CableRateOption = None
    wrap: WrapOption = "none"

    def mesh(self, shape: str) -> Mesh:
        """Return the mesh that the options describe."""
        wrap = read_wrap(self.wrap, Mesh(shape).n_axes)
        return self.added_to(Mesh(shape, wrap=wrap))

    def added_to(self, mesh: Mesh) -> Mesh:
        """Return a mesh with the failures that the options add to it."""
        rates = [parse_cable_rate(text) for text in self.cable_rate or ()]
        return mesh.with_failures(self.fail or (), self.fail_cable or (), rates)


@dataclass(frozen=True)
class MachineOptions:
    """A machine as its own tools describe it, in place of a shape."""

    machine: Annotated[
        Path | None,
        option(
            "--machine",
            "FILE",
            "In place of SHAPE, a description, with its hardware if it has any: see `meshmend machine`.",
        ),
    ] = None
    intended: IntendedOption = None

    @cached_property
    def described(self) -> Machine:
        """The machine that the description amounts to."""
        if self.machine is None:
            raise ParameterError("There is no description to read: give --machine FILE.")
        return read_machine(self.machine, intended=self.intended)

    def hardware(self, given: str | None) -> str | None:
        """Return the hardware that was given, else what the machine's description says; None if nothing does."""
        return given if given is not None or self.machine is None else self.described.hardware

    def mesh(self, shape: str | None, holes: HoleOptions) -> Mesh:
        """Return the machine's mesh with further holes, or the mesh of the shape."""
        if self.machine is None:
            if self.intended is not None:
                raise ParameterError("--intended goes with --machine: give the description of what is there as well.")
            if shape is None:
                raise typer.BadParameter("Missing argument 'SHAPE': give a shape, or --machine FILE")
            return holes.mesh(shape)
        if shape is not None or holes.wrap != "none":
            said = shape if shape is not None else f"--wrap {holes.wrap}"
            raise ParameterError(f"{self.machine} already says what mesh it is: leave out {said}.")
        return holes.added_to(self.described.mesh)


@dataclass(frozen=True)
class AutoOptions:
    """The payload and hardware to plan for, in commands that use them for nothing else."""

    payload: OptionalPayloadOption = None
    hardware: HardwareOption = None


@dataclass(frozen=True)
class PriceOptions:
    """The hardware that time is predicted for, and how the engine synchronizes."""

    hardware: HardwareOption = None
    mode: Annotated[
        str, option("--mode", "NAME", "How the engine synchronizes: lock-step (a barrier per step), or asynchronous.")
    ] = "lock-step"

    def read_hardware(self, machine: MachineOptions) -> Hardware:
        """Return the hardware that was given, or else that of the machine's description."""
        return find_hardware(machine.hardware(self.hardware) or DEFAULT_HARDWARE)

    def read_mode(self) -> Mode:
        """Return the mode of that name."""
        for known in MODES:
            if self.mode == known:
                return known
        raise ParameterError(f"--mode {self.mode}: expected one of: {', '.join(MODES)}.")


def tuned_planner(
    name: str,
    payload: str | float | None = None,
    hardware: str | Hardware | None = None,
    mode: Mode | None = None,
    *,
    collective: str = Collective.ALL_REDUCE,
) -> Planner:
    """Return the planner of that name; it chooses parameters that the name lacks for the payload, if that is known."""
    given: dict[str, Any] = {
        "payload_bytes": parse_bytes(payload) if isinstance(payload, str) else payload,
        "hardware": hardware,
        "mode": mode,
    }
    return make_planner(name, collective=collective, **{key: one for key, one in given.items() if one is not None})


def read_wrap(text: str, n_axes: int) -> list[bool]:
    """Return for each axis whether it wraps."""
    return parse_wrap(text, n_axes, given=f"--wrap {text}:")


def given_options(
    *bundles: HoleOptions | MachineOptions | AutoOptions,
    planner: str = Auto.name,
    collective: str = Collective.ALL_REDUCE,
    neighbours_only: bool = False,
) -> list[str]:
    """Return which of these options, and of those in the bundles, were given.

    >>> given_options(HoleOptions(fail_cable=["0,0-0,1"]), MachineOptions(), planner="weave")
    ['--fail-cable', '--planner']
    """
    others = {
        "--planner": planner != Auto.name,
        "--collective": collective != Collective.ALL_REDUCE,
        "--neighbours-only": neighbours_only,
    }
    return [
        f"--{field.name.replace('_', '-')}"
        for bundle in bundles
        for field in fields(bundle)
        if getattr(bundle, field.name) != field.default
    ] + [name for name, is_given in others.items() if is_given]


def is_file(argument: str) -> bool:
    """Return whether an argument names a saved plan; otherwise it is taken as a shape.

    >>> is_file("16x32"), is_file("plan.npz"), is_file("plans/today"), is_file("8y8")
    (False, True, True, False)
    """
    if is_shape(argument):
        return False
    return Path(argument).suffix == ".npz" or "/" in argument or Path(argument).exists()


def load_plan(file: str, *given: str, proven: bool = True) -> Schedule:
    """Read a saved plan and prove it. The file determines the mesh and the plan, so `given` options are refused."""
    if given:
        raise ParameterError(
            f"{file} is a saved plan, which already determines its mesh and its holes: leave out {', '.join(given)}."
        )
    schedule = load(file)
    if proven:
        ensure_proven(schedule)
    return schedule


def unbundled(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with every bundle among its parameters replaced by the bundle's fields.

    >>> def command(shape: ShapeArgument, holes: HoleOptions) -> None:
    ...     print(holes.mesh(shape))
    >>> list(inspect.signature(unbundled(command)).parameters)
    ['shape', 'fail', 'fail_cable', 'cable_rate', 'wrap']
    >>> unbundled(command)(shape="8x8", fail=["2x2@2,2"], fail_cable=None, cable_rate=None, wrap="none")
    8x8 minus 2x2@2,2
    """
    signature = inspect.signature(command, eval_str=True)
    bundles: dict[str, Any] = {
        name: p.annotation for name, p in signature.parameters.items() if is_dataclass(p.annotation)
    }
    flat: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name not in bundles:
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(bundles[name], include_extras=True)
        for field in fields(bundles[name]):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            flat.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
                )
            )

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, bundle in bundles.items():
            given[name] = bundle(**{field.name: given.pop(field.name) for field in fields(bundle)})
        command(**given)

    call.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return call
