"""The options of a study of `meshmend availability`, and running it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from meshmend.availability import Assumptions, Study, simulate
from meshmend.availability.assumptions import GROWS, JOB_HARDWARE
from meshmend.availability.job import require_simpy
from meshmend.availability.log import FailureLog, Rates, read_log
from meshmend.availability.plot import sweep
from meshmend.availability.throughput import Throughput
from meshmend.cli.options import CableRateOption, HoleOptions, MachineOptions, WrapOption, complete_hardware
from meshmend.cli.terminal import working
from meshmend.cost import PRESETS
from meshmend.cost.units import parse_bytes
from meshmend.errors import ParameterError
from meshmend.machines.machine import through_xla
from meshmend.topology import parse_shape

MAX_DAYS = 36_500
"""A century: longer than any machine runs, and short enough to simulate."""


Logged = tuple[FailureLog, tuple[Rates, ...]]
"""A log, and its rates."""
RATES = ("mtbf_chip_h", "mtbf_board_h", "mtbf_host_h", "repair_chip_h", "repair_board_h", "repair_host_h")
"""Options that a log replaces; of parts that it has no repairs of, the time to repair stays."""
AS_GIVEN = ({field.name for field in fields(Assumptions)} | set(RATES)) - {"host", "cube", "slice_shape", "hardware"}
"""Options that are assumptions as they are, under the same names."""


def _hours(what: str, name: str) -> Any:
    return typer.Option(f"--{name}", metavar="HOURS", help=what)


def _seconds(what: str, name: str) -> Any:
    return typer.Option(f"--{name}", metavar="S", min=0.0, help=what)


@dataclass(frozen=True)
class StudyOptions:
    """The machine's parts, how they fail, how a job restarts, what it trains, and how long to simulate."""

    host: Annotated[str, typer.Option("--host", metavar="HxW", help="Chips per host; hosts tile the mesh.")] = "4x2"
    board: Annotated[
        str, typer.Option("--board", metavar="HxW", help="Chips per board; boards tile a host. Or none.")
    ] = "2x2"
    wrap: WrapOption = "none"
    cable_rate: CableRateOption = None
    days: Annotated[float, typer.Option("--days", metavar="DAYS", min=0.0, help="Length of a run.")] = 365.0
    runs: Annotated[
        int, typer.Option("--runs", metavar="N", min=1, help="Independent runs; more runs give narrower intervals.")
    ] = 20
    mtbf_chip_h: Annotated[float, _hours("Mean time between failures of a chip; inf: never.", "mtbf-chip")] = 85_000
    mtbf_board_h: Annotated[float, _hours("The same of a board, not counting its chips.", "mtbf-board")] = 150_000
    mtbf_host_h: Annotated[float, _hours("The same of a host, not counting its boards.", "mtbf-host")] = 19_000
    repair_chip_h: Annotated[float, _hours("Mean time to repair a chip.", "repair-chip")] = 24.0
    repair_board_h: Annotated[float, _hours("Mean time to repair a board.", "repair-board")] = 24.0
    repair_host_h: Annotated[float, _hours("Mean time to repair a host.", "repair-host")] = 24.0
    log: Annotated[
        Path | None,
        typer.Option(
            "--log", metavar="CSV", help="Failure and repair rates from your log: time, host (board, chip), event."
        ),
    ] = None
    log_chips: Annotated[
        int | None,
        typer.Option("--log-chips", metavar="N", min=1, help="Chips the log is about; default: those of the machine."),
    ] = None
    quick_repair_h: Annotated[float, _hours("quick repair: mean time to repair anything.", "quick-repair")] = 4.0
    checkpoint_min: Annotated[
        float, typer.Option("--checkpoint-minutes", metavar="MINUTES", help="Training time between checkpoints.")
    ] = 60.0
    save_s: Annotated[float, _seconds("How long training pauses for a checkpoint.", "save-seconds")] = 30.0
    copies_s: Annotated[
        float, _seconds("With copies in memory, training that a failure loses at most.", "copies-seconds")
    ] = math.inf
    detect_s: Annotated[float, _seconds("Time from a failure to a decision.", "detect-seconds")] = 60.0
    restart_s: Annotated[float, _seconds("Time from a decision to the first step.", "restart-seconds")] = 300.0
    swap_s: Annotated[float, _seconds("hot spares: time to wire a spare in.", "swap-seconds")] = 60.0
    replan_s: Annotated[float, _seconds("fault-tolerant: time to plan round the hole.", "replan-seconds")] = 10.0
    grow: Annotated[
        str,
        typer.Option(
            "--grow", metavar="NAME", help=f"When a smaller job takes repaired chips back: {', '.join(GROWS)}."
        ),
    ] = "worth"
    spares: Annotated[int, typer.Option("--spares", metavar="N", min=0, help="hot spares: hosts kept ready.")] = 2
    cube: Annotated[
        str | None,
        typer.Option(
            "--cube", metavar="DxHxW", help="optical cubes, dynamic slices: chips lost together; default: 64."
        ),
    ] = None
    spare_cubes: Annotated[
        int, typer.Option("--spare-cubes", metavar="N", min=0, help="optical cubes: cubes kept ready.")
    ] = 2
    ocs_s: Annotated[float, _seconds("cubes: time to reconfigure the switches.", "ocs-seconds")] = 10.0
    slice_shape: Annotated[
        str | None,
        typer.Option("--slice", metavar="HxW", help="elastic slices: chips of a slice; default: half of two axes."),
    ] = None
    elastic_s: Annotated[
        float, _seconds("elastic slices: time to go on without a slice, or with it.", "elastic-seconds")
    ] = 30.0
    replace_h: Annotated[
        float | None, _hours("elastic slices: mean time to replace one; default: as a repair.", "replace-slice")
    ] = None
    price: Annotated[float, typer.Option("--price", min=0.0, metavar="$", help="Price per chip-hour.")] = 2.0
    crew_price: Annotated[
        float, typer.Option("--crew-price", min=0.0, metavar="$", help="quick repair: price of the crew per hour.")
    ] = 0.0
    payload: Annotated[
        str | None,
        typer.Option(
            "--payload",
            metavar="SIZE",
            help="Bytes that a step sums: a job sends 4 per gradient. Default: BERT, 1.34GB.",
        ),
    ] = None
    compute_s: Annotated[
        float | None,
        typer.Option("--compute-seconds", metavar="S", help="A step without its all-reduce; default: BERT, 0.132."),
    ] = None
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            metavar="NAME",
            help=f"One of: {', '.join(PRESETS)}; or a file that `doctor --measure` wrote.",
            show_default=f"the machine's, as a job drives it: {JOB_HARDWARE}",
            autocompletion=complete_hardware,
        ),
    ] = None
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Random seed.")] = 0
    checks: Annotated[
        int, typer.Option("--checks", metavar="N", min=0, help="States to plan in full, to check the estimates.")
    ] = 2

    def check(self) -> None:
        """Raise an error if no study can be made; called before the work."""
        require_simpy()
        if not 0 < self.days <= MAX_DAYS:
            raise ParameterError(f"--days {self.days:g}: expected more than 0, and at most {MAX_DAYS:,}.")

    def assumptions(self, machine: MachineOptions, shape: str | None) -> tuple[Assumptions, Logged | None]:
        """Return what the options assume, of the machine with nothing failed, and the log that its rates are from."""
        found = self._without_log(machine, shape)
        logged = self._read_log(found)
        if logged is None:
            return found, None
        log, rates = logged
        source = f"{log.path.name}: {log.n_failures:,} failures in {log.hours / 24:,.1f} days"
        return found.with_rates(rates, source), logged

    def _read_log(self, assumptions: Assumptions) -> Logged | None:
        """Return the log, and the rates of the parts that it has a column for; None without a log."""
        if self.log is None:
            if self.log_chips is not None:
                raise ParameterError("--log-chips goes with --log: give the log, or leave it out.")
            return None
        for name in RATES:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                option = name.removesuffix("_h").replace("_", "-")
                raise ParameterError(f"--{option} and --log both give a rate: leave out one of them.")
        chips = assumptions.mesh.size if self.log_chips is None else self.log_chips
        log = read_log(self.log)
        sizes = {level.name: math.prod(level.shape) for level in assumptions.levels}
        for kind in log.outages:
            if kind not in sizes:
                raise ParameterError(f"{self.log} has a column {kind!r}, but the machine has no {kind}s: see --{kind}.")
            if chips % sizes[kind]:
                raise ParameterError(f"--log-chips {chips}: {sizes[kind]} chips per {kind} do not divide them.")
        return log, log.rates({kind: chips // sizes[kind] for kind in log.outages})

    def _without_log(self, machine: MachineOptions, shape: str | None) -> Assumptions:
        mesh = machine.mesh(shape, HoleOptions(wrap=self.wrap, cable_rate=self.cable_rate))
        described = machine.hardware(None)
        driven = JOB_HARDWARE if described is None else through_xla(described)
        given: dict[str, Any] = {
            name: value for name, value in vars(self).items() if name in AS_GIVEN and value is not None
        }
        if self.payload is not None:
            given["payload_bytes"] = parse_bytes(self.payload)
        return Assumptions.of(
            # The simulation makes failures of its own; slow cables stay.
            mesh.whole,
            host=parse_shape(self.host),
            board=None if self.board == "none" else parse_shape(self.board),
            hardware=self.hardware or driven,
            cube=() if self.cube is None else parse_shape(self.cube),
            slice_shape=() if self.slice_shape is None else parse_shape(self.slice_shape),
            **given,
        )

    def simulate(
        self, assumptions: Assumptions, *, swept: bool, as_json: bool
    ) -> tuple[Study, list[tuple[float, Study]]]:
        """Return the study and, if wanted, those of machines that fail more and less often; with a bar to watch."""
        throughput = Throughput(assumptions)
        with working("planning, then simulating", as_json, total=self.runs) as tell:
            study = simulate(
                assumptions,
                days=self.days,
                runs=self.runs,
                seed=self.seed,
                checks=self.checks,
                throughput=throughput,
                on_run=lambda _: tell(advance=1),
            )
            if not swept:
                return study, []
            tell("sweeping failure rates")
            return study, sweep(study, throughput)
