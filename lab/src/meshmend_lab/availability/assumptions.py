"""Assumptions: every number that a study uses, with its source."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from meshmend.cost.hardware import DEFAULT_HARDWARE, Hardware, find_hardware
from meshmend.cost.units import did_you_mean, format_bytes, name_seconds, parse_bytes, parse_settings
from meshmend.errors import MeshError, ParameterError
from meshmend.machines.machine import through_xla
from meshmend.topology import Mesh, name_shape, parse_shape

Grow = Literal["worth", "checkpoint", "at-once", "failure"]
GROWS: tuple[Grow, ...] = get_args(Grow)

CUBES: Mapping[int, tuple[int, ...]] = {1: (64,), 2: (8, 8), 3: (4, 4, 4)}
"""The 64 chips of a cube, by the axes of the machine."""
CUBE_SIDE = 4
"""On machines of more axes."""

BYTES_PER_SUM = 4
"""What a job sends per gradient: sums are float32, whatever the gradients are (`accumulate_dtype` of `mmj.plan`)."""
JOB_HARDWARE = through_xla(DEFAULT_HARDWARE)
"""The default hardware, as a job's engine drives it."""

BERT_PARAMETERS = 334e6
BERT_PARAMETERS_SOURCE = "BERT-large, Devlin et al., 2018, quoted there as 340 M; 334 M with tied embeddings"
BERT_STEP_S = 1.16 * 60 / 496
BERT_STEP_SOURCE = (
    "1.16 minutes (Kumar and Jouppi, 2020, table 1) over 496 steps, the steps to the target accuracy at batch 8,192 in "
    "MLPerf v0.7 (mlcommons/training_results_v0.7, Google/results/tpu-v3-8192-TF/bert/result_0.txt). That "
    "the same batch was used on 1024 chips is an assumption"
)
BERT_OVERHEAD = 0.060
"""Share of the all-reduce in a step of BERT on 1024 chips: Kumar and Jouppi, 2020, table 2."""

_LLAMA = (
    "The Llama 3 Herd of Models (Meta, 2024), table 5: 419 unexpected interruptions in 54 days on 16,384 GPUs, 8 per "
    "host. GPUs, not TPUs: no failure rate of a 2-D TPU mesh is published that we know of"
)
Unit = Literal["h", "min", "s", "$", "bytes", "chips", "parts", "rule"]
_REPAIR = "an estimate: found, fetched, changed and tested within a day"


@dataclass(frozen=True)
class Assumption:
    """A row of the table: what a number says, its unit, where its default comes from.

    `absent` is what it means that there is none: no shape, None or infinity.
    """

    what: str
    unit: Unit
    source: str
    absent: str = ""

    def read(self, name: str, text: str) -> object:
        """Return the value that a text says, in the unit of its name; bytes have their own."""
        if self.unit == "chips":
            return None if self.absent and text == "none" else parse_shape(text)
        if self.unit == "bytes":
            return parse_bytes(text)
        if self.unit == "rule":
            return text
        try:
            return int(text) if self.unit == "parts" else float(text)
        except ValueError:
            number = "a whole number" if self.unit == "parts" else f"a number, in {self.unit}"
            raise ParameterError(f"{name} is {text!r}, expected {number}.") from None

    def write(self, value: Any) -> str:
        """Return a value as people read it."""
        if value in (None, (), math.inf):
            return self.absent
        match self.unit:
            case "h" | "min":
                return f"{value:,.10g} {self.unit}"
            case "s":
                return name_seconds(value)
            case "$":
                return f"${value:,.2f}"
            case "bytes":
                return format_bytes(value)
            case "chips":
                return name_shape(value)
        return str(value)


def _assumed(default: Any, what: str, unit: Unit, source: str, absent: str = "") -> Any:
    return dataclasses.field(default=default, metadata={"about": Assumption(what, unit, source, absent)})


@dataclass(frozen=True)
class Level:
    """A kind of part that fails as a whole: a chip, a board, a host. `shape` tiles the mesh.

    `mtbf_h` is the mean time between failures of one such part, `repair_h` the mean time to repair it. Both are
    exponentially distributed; an infinite `mtbf_h` means that it never fails.
    """

    name: str
    shape: tuple[int, ...]
    mtbf_h: float
    repair_h: float

    def __post_init__(self) -> None:
        if not self.mtbf_h > 0:
            raise ParameterError(f"The {self.name}'s mean time between failures is {self.mtbf_h} h, expected above 0.")
        if not 0 <= self.repair_h < math.inf:
            raise ParameterError(f"The {self.name}'s mean time to repair is {self.repair_h} h, expected 0 or more.")


@dataclass(frozen=True)
class Assumptions:
    """A machine, how its parts fail, how a job on it restarts, and what it trains. `TABLE` describes each number.

    `mesh` is the machine with nothing failed; its slow cables count. `payload_bytes` is what a step's all-reduce sums,
    on `hardware`: by default as a job sends it and its engine drives the machine. `levels` are the parts that fail.
    `host` is the unit that is swapped for a spare and that a sub-mesh is made of. `grow` says when a job on
    fewer chips takes repaired ones back. `worth`: at the next checkpoint, if they are worth the restart; `checkpoint`:
    at every next one. `at-once`: after saving one; `failure`: only when the next one interrupts the job anyway.

    A `cube` is what optical switches replace as a whole, a slice of `slice_shape` what elastic training loses as a
    whole; left empty, they are chosen to fit the machine. `replace_h` is the mean time to replace a lost slice, None
    for that of a repair. A failure loses at most `copies_s` of the training since the last checkpoint.

    >>> a = Assumptions.of("32x32")
    >>> round(a.failures_per_h * 24, 2), "failures per day"
    (0.49, 'failures per day')
    """

    mesh: Mesh
    host: tuple[int, ...] = _assumed(
        (4, 2), "chips per host; hosts tile the mesh", "chips", "a choice: the hole of Kumar and Jouppi, 2020"
    )
    board: tuple[int, ...] | None = _assumed(
        (2, 2), "chips per board; boards tile a host", "chips", "a choice: two boards per host", "none"
    )
    mtbf_chip_h: float = _assumed(
        85_000.0,
        "mean time between failures of a chip",
        "h",
        f"246 of the 419 (58.7 %) were attributed to a GPU or its memory: 54 d × 16,384 / 246. {_LLAMA}",
        "never fails",
    )
    mtbf_board_h: float = _assumed(
        150_000.0,
        "mean time between failures of a board, not counting its chips",
        "h",
        f"35 of the 419 (8.4 %) were network switches and cables, counted as a board's: 54 d × 4,096 / 35. {_LLAMA}",
        "never fails",
    )
    mtbf_host_h: float = _assumed(
        19_000.0,
        "mean time between failures of a host, not counting its boards",
        "h",
        f"the other 138 of the 419, software included, as a host's: 54 d × 2,048 / 138. {_LLAMA}",
        "never fails",
    )
    repair_chip_h: float = _assumed(24.0, "mean time to repair a chip", "h", _REPAIR)
    repair_board_h: float = _assumed(24.0, "mean time to repair a board", "h", _REPAIR)
    repair_host_h: float = _assumed(24.0, "mean time to repair a host", "h", _REPAIR)
    quick_repair_h: float = _assumed(
        4.0,
        "quick repair: mean time to repair anything",
        "h",
        "an estimate: four hours is a common service level for replacing hardware on site",
    )
    checkpoint_min: float = _assumed(
        60.0, "training between checkpoints", "min", "about every hour, cloud.google.com/tpu/docs/maintenance-events"
    )
    save_s: float = _assumed(
        30.0,
        "training pauses for a checkpoint",
        "s",
        "an estimate within the 'seconds to minutes' of cloud.google.com/tpu/docs/maintenance-events",
    )
    copies_s: float = _assumed(
        math.inf,
        "training that a failure loses at most, with copies in memory",
        "s",
        "not assumed unless given: a failure falls back to the last checkpoint. A job with copies of its state in "
        "memory, as under `meshmend run`, loses a few steps",
        "no copies",
    )
    detect_s: float = _assumed(
        60.0, "from a failure to a decision", "s", "an estimate: a few missed heartbeats and a decision"
    )
    restart_s: float = _assumed(
        300.0,
        "from a decision to the first step",
        "s",
        "an estimate: start the processes, compile or load the program, restore the checkpoint",
    )
    swap_s: float = _assumed(
        60.0, "hot spares: to wire a spare in", "s", "an estimate: wire a spare host into the mesh and test its links"
    )
    replan_s: float = _assumed(
        10.0,
        "fault-tolerant: to plan round the hole",
        "s",
        "an estimate: plan and prove for a 32x32 mesh takes a few seconds (`meshmend plan`)",
    )
    grow: Grow = _assumed(  # noqa: RUF009  # a text
        "worth", f"when a smaller job takes repaired chips back: {', '.join(GROWS)}", "rule", "a choice"
    )
    spares: int = _assumed(
        2,
        "hot spares: hosts kept ready",
        "parts",
        "a choice: two hosts; that any spare can replace any host favours this policy",
    )
    cube: tuple[int, ...] = _assumed(
        (),
        "optical cubes, dynamic slices: chips that are lost together",
        "chips",
        "a choice: 64 chips, as in TPU v4 and v5p, whose cubes are 4x4x4 (Jouppi et al., ISCA 2023), or as near to it "
        "as hosts and mesh allow. No 2-D machine is built of cubes: there it shows what optical switches would be "
        "worth",
        "64 chips",
    )
    spare_cubes: int = _assumed(
        2,
        "optical cubes: cubes kept ready",
        "parts",
        "a choice: two, as of hosts. Gemini's report (2023) has 'a small number of cubes' per pod ready",
    )
    ocs_s: float = _assumed(
        10.0,
        "optical cubes, dynamic slices: to reconfigure the switches",
        "s",
        "optical switches join cubes to another torus 'in around 10 seconds': Gemini's report (2023), on TPU v4",
    )
    slice_shape: tuple[int, ...] = _assumed(
        (),
        "elastic slices: chips of a slice",
        "chips",
        "a choice: half of each of the first two axes, so quarters; of 32x32 they are 16x16, the largest slice of TPU "
        "v5e and v6e",
        "half of two axes",
    )
    elastic_s: float = _assumed(
        30.0,
        "elastic slices: to go on without a slice, or with it",
        "s",
        "an estimate within the 'tens of seconds of lost training time per interruption' of slice-granularity "
        "elasticity: Gemini 2.5's report (2025)",
    )
    replace_h: float | None = _assumed(
        None,
        "elastic slices: mean time to replace one",
        "h",
        "not assumed unless given: a lost slice is back when it is repaired. To be given other machines takes '10 or "
        "more' minutes (Gemini 2.5's report); they are not paid for here",
        "as a repair",
    )
    price: float = _assumed(
        2.0,
        "price of a chip-hour",
        "$",
        "list price of TPU v3: $8 per hour for a v3-8, which is four chips; set your own",
    )
    crew_price: float = _assumed(
        0.0,
        "quick repair: price of the crew per hour",
        "$",
        "not counted unless given: the cost of a crew that is always on site",
    )
    compute_s: float = _assumed(
        BERT_STEP_S * (1 - BERT_OVERHEAD),
        "a step without its all-reduce",
        "s",
        f"BERT on 1024 chips of TPU v3: {BERT_STEP_SOURCE}, less the {BERT_OVERHEAD:.1%} that table 2 gives to the "
        "all-reduce",
    )
    payload_bytes: float = _assumed(
        BERT_PARAMETERS * BYTES_PER_SUM,
        "gradients per step, as they are summed",
        "bytes",
        f"BERT's gradients, {BYTES_PER_SUM} bytes each, as a job sums them (float32): {BERT_PARAMETERS_SOURCE}",
    )
    hardware: Hardware = dataclasses.field(default_factory=lambda: find_hardware(JOB_HARDWARE))

    @classmethod
    def of(cls, mesh: Mesh | str, *, hardware: str | Hardware = JOB_HARDWARE, **others: Any) -> Assumptions:
        """Return the assumptions for a machine; `others` are fields."""
        machine = Mesh(mesh) if isinstance(mesh, str) else mesh
        return cls(machine, hardware=find_hardware(hardware), **others)

    def __post_init__(self) -> None:
        if not self.mesh.is_full:
            raise MeshError(f"A study starts with a whole machine: got {self.mesh}. Leave the failures out.")
        for level in self.levels:
            self._check_part(level.name, level.shape, larger=("host", self.host))
        self._fit_larger_parts()
        for field, about in TABLE.items():
            value = getattr(self, field)
            if about.unit in ("chips", "rule") or (about.absent and value in (None, math.inf)):
                continue
            if field in ("checkpoint_min", "compute_s") and not 0 < value < math.inf:
                raise ParameterError(f"{field} is {value}, expected a positive number.")
            if not 0 <= value < math.inf:
                raise ParameterError(f"{field} is {value}, expected 0 or more.")
        if self.grow not in GROWS:
            raise ParameterError(f"grow is {self.grow!r}, expected one of: {', '.join(GROWS)}.")

    def _fit_larger_parts(self) -> None:
        """Check cubes and slices, and choose those that are not given."""
        sides = CUBES.get(self.mesh.n_axes, (CUBE_SIDE,) * self.mesh.n_axes)
        halves = tuple(n // 2 if axis < 2 else n for axis, n in enumerate(self.mesh.shape))
        for field, given, wanted in (("cube", self.cube, sides), ("slice_shape", self.slice_shape, halves)):
            if given:
                self._check_part("host", self.host, larger=(field.removesuffix("_shape"), given))
            else:
                object.__setattr__(self, field, _fitting(self.mesh.shape, self.host, wanted))

    def _check_part(self, name: str, shape: tuple[int, ...], larger: tuple[str, tuple[int, ...]]) -> None:
        """Raise `MeshError` unless a part and the larger one that is made of it tile the mesh."""
        whole = self.mesh.shape
        for one, chips in ((name, shape), larger):
            if len(chips) != len(whole) or any(n % c for n, c in zip(whole, chips, strict=True)):
                raise MeshError(f"A {one} of {name_shape(chips)} chips does not tile a {name_shape(whole)} mesh.")
        if any(n % c for n, c in zip(larger[1], shape, strict=True)):
            raise MeshError(
                f"A {larger[0]} of {name_shape(larger[1])} chips is not made of {name}s of {name_shape(shape)}."
            )

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The parts that fail as a whole, the largest first."""
        parts = {"host": self.host, "board": self.board, "chip": (1,) * self.mesh.n_axes}
        return tuple(
            Level(name, shape, getattr(self, f"mtbf_{name}_h"), getattr(self, f"repair_{name}_h"))
            for name, shape in parts.items()
            if shape is not None
        )

    @property
    def failures_per_h(self) -> float:
        """Failures per hour of the whole machine, with nothing down."""
        return sum(self.parts(level) / level.mtbf_h for level in self.levels)

    def parts(self, level: Level) -> int:
        """Return how many parts of a level the machine has."""
        return self.mesh.size // math.prod(level.shape)

    def scaled(self, factor: float) -> Assumptions:
        """Return these assumptions with every mean time between failures scaled."""
        longer = {f"mtbf_{level.name}_h": level.mtbf_h * factor for level in self.levels}
        return dataclasses.replace(self, **longer)  # type: ignore[arg-type]  # they are rates


TABLE: dict[str, Assumption] = {
    field.name: field.metadata["about"] for field in dataclasses.fields(Assumptions) if field.metadata
}
"""Every assumption that has a number, a shape or a rule, by its name in Python and in `--assume`."""
DEFAULTS = {name: getattr(Assumptions, name) for name in TABLE}
SOURCES: Mapping[str, str] = {name: about.source for name, about in TABLE.items()} | {
    "hardware": "the machine's, as the engine of a job drives it: a TPU through XLA (the presets with -xla)"
}


def read_assumptions(texts: Iterable[str]) -> dict[str, Any]:
    """Read assumptions as people write them, each in the unit of its name.

    >>> read_assumptions(["spares=1,host=2x2", "payload_bytes=50MB"])
    {'spares': 1, 'host': (2, 2), 'payload_bytes': 50000000.0}
    """
    found: dict[str, Any] = {}
    for name, text in parse_settings(",".join(texts)).items():
        if name not in TABLE:
            listed = ", ".join(f"{key} ({about.write(DEFAULTS[key])})" for key, about in TABLE.items())
            near = did_you_mean(name, TABLE)
            raise ParameterError(f"There is no assumption {name!r}.{near} Assumptions, with their defaults: {listed}.")
        found[name] = TABLE[name].read(name, text)
    return found


def name_payload(assumptions: Assumptions) -> str:
    """Write what a step sums; of the default workload, also how many bytes of each gradient travel."""
    is_default = assumptions.payload_bytes == Assumptions.payload_bytes
    each = f" ({BYTES_PER_SUM} bytes per gradient, as a job sends them)" if is_default else ""
    return format_bytes(assumptions.payload_bytes) + each


def _fitting(shape: tuple[int, ...], host: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the largest part of whole hosts that tiles the mesh and is on no axis longer than wanted, or a host.

    >>> _fitting((32, 12), (4, 2), (8, 8))
    (8, 6)
    """
    return tuple(
        max(part for part in range(h, max(h, most) + 1, h) if n % part == 0)
        for n, h, most in zip(shape, host, wanted, strict=True)
    )
