"""Assumptions: every number that a study uses, with its source."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from meshmend.availability.log import Rates
from meshmend.cost.hardware import DEFAULT_HARDWARE, Hardware, find_hardware
from meshmend.cost.units import format_bytes
from meshmend.errors import MeshError, ParameterError
from meshmend.machines.machine import through_xla
from meshmend.topology import Mesh, name_shape

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
    "MLPerf v0.7 (mlcommons/training_results_v0.7, Google/results/tpu-v3-8192-TF/bert/result_0.txt); that the same "
    "batch was used on 1024 chips is an assumption"
)
BERT_OVERHEAD = 0.060
"""Share of the all-reduce in a step of BERT on 1024 chips: Kumar and Jouppi, 2020, table 2."""

_LLAMA = (
    "The Llama 3 Herd of Models (Meta, 2024), table 5: 419 unexpected interruptions in 54 days on 16,384 GPUs, 8 per "
    "host. GPUs, not TPUs: no failure rate of a 2-D TPU mesh is published that we know of"
)
SOURCES: Mapping[str, str] = {
    "mtbf_chip_h": f"246 of the 419 (58.7 %) were attributed to a GPU or its memory: 54 d × 16,384 / 246. {_LLAMA}",
    "mtbf_board_h": f"35 of the 419 (8.4 %) were network switches and cables, counted as a board's: 54 d × 4,096 / "
    f"35. {_LLAMA}",
    "mtbf_host_h": f"the other 138 of the 419, software included, as a host's: 54 d × 2,048 / 138. {_LLAMA}",
    "repair_h": "an estimate: found, fetched, changed and tested within a day",
    "quick_repair_h": "an estimate: four hours is a common service level for replacing hardware on site",
    "checkpoint_min": "about every hour, cloud.google.com/tpu/docs/maintenance-events",
    "save_s": "an estimate within the 'seconds to minutes' of cloud.google.com/tpu/docs/maintenance-events",
    "detect_s": "an estimate: a few missed heartbeats and a decision",
    "restart_s": "an estimate: start the processes, compile or load the program, restore the checkpoint",
    "swap_s": "an estimate: wire a spare host into the mesh and test its links",
    "replan_s": "an estimate: plan and prove for a 32x32 mesh takes a few seconds (`meshmend plan`)",
    "spares": "a choice: two hosts; that any spare can replace any host favours this policy",
    "cube": "a choice: 64 chips, as in TPU v4 and v5p, whose cubes are 4x4x4 (Jouppi et al., ISCA 2023), or as near to "
    "it as hosts and mesh allow. No 2-D machine is built of cubes: there it shows what optical switches would be worth",
    "spare_cubes": "a choice: two, as of hosts. Gemini's report (2023) has 'a small number of cubes' per pod ready",
    "ocs_s": "optical switches join cubes to another torus 'in around 10 seconds': Gemini's report (2023), on TPU v4",
    "slice_shape": "a choice: half of each of the first two axes, so quarters; of 32x32 they are 16x16, the largest "
    "slice of TPU v5e and v6e",
    "elastic_s": "an estimate within the 'tens of seconds of lost training time per interruption' of slice-granularity "
    "elasticity: Gemini 2.5's report (2025)",
    "replace_h": "not assumed unless given: a lost slice is back when it is repaired. To be given other machines takes "
    "'10 or more' minutes (Gemini 2.5's report); they are not paid for here",
    "copies_s": "not assumed unless given: a failure falls back to the last checkpoint. A job with copies of its state "
    "in memory, as under `meshmend run`, loses a few steps",
    "price": "list price of TPU v3: $8 per hour for a v3-8, which is four chips; set your own",
    "crew_price": "not counted unless given: the cost of a crew that is always on site",
    "compute_s": f"BERT on 1024 chips of TPU v3: {BERT_STEP_SOURCE}, less the {BERT_OVERHEAD:.1%} that table 2 "
    "gives to the all-reduce",
    "payload_bytes": f"BERT's gradients, {BYTES_PER_SUM} bytes each, as a job sums them (float32): "
    f"{BERT_PARAMETERS_SOURCE}",
    "hardware": "the machine's, as the engine of a job drives it: a TPU through XLA (the presets with -xla)",
}


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
    """A machine, how its parts fail, how a job on it restarts, and what it trains. `SOURCES` has each number's source.

    `mesh` is the machine with nothing failed; its slow cables count. `payload_bytes` is what a step's all-reduce sums,
    on `hardware`: by default as a job sends it and its engine drives the machine. `levels` are the parts that fail.
    `host` is the unit that is swapped for a spare and that a sub-mesh is made of. `grow` says when a job that runs on
    fewer chips takes repaired ones back: at the end of the next checkpoint if that is `worth` the restart, at every
    next `checkpoint`, `at-once` (saving a checkpoint first), or only when the next `failure` interrupts it anyway.

    A `cube` is what optical switches replace as a whole, a slice of `slice_shape` what elastic training loses as a
    whole; left empty, they are chosen to fit the machine. `replace_h` is the mean time to replace a lost slice, None
    for that of a repair. Of the training since the last checkpoint, a failure loses at most `copies_s`.

    >>> a = Assumptions.of("32x32")
    >>> round(a.failures_per_h * 24, 2), "failures per day"
    (0.49, 'failures per day')
    """

    mesh: Mesh
    host: tuple[int, ...]
    levels: tuple[Level, ...]
    quick_repair_h: float = 4.0
    checkpoint_min: float = 60.0
    save_s: float = 30.0
    detect_s: float = 60.0
    restart_s: float = 300.0
    swap_s: float = 60.0
    replan_s: float = 10.0
    spares: int = 2
    price: float = 2.0
    crew_price: float = 0.0
    compute_s: float = BERT_STEP_S * (1 - BERT_OVERHEAD)
    payload_bytes: float = BERT_PARAMETERS * BYTES_PER_SUM
    hardware: Hardware = dataclasses.field(default_factory=lambda: find_hardware(JOB_HARDWARE))
    grow: Grow = "worth"
    cube: tuple[int, ...] = ()
    spare_cubes: int = 2
    ocs_s: float = 10.0
    slice_shape: tuple[int, ...] = ()
    elastic_s: float = 30.0
    replace_h: float | None = None
    copies_s: float = math.inf
    rates_from: str = ""
    """Where the failure and repair rates come from, if not from `SOURCES`."""

    @classmethod
    def of(
        cls,
        mesh: Mesh | str,
        *,
        host: tuple[int, ...] = (4, 2),
        board: tuple[int, ...] | None = (2, 2),
        mtbf_chip_h: float = 85_000,
        mtbf_board_h: float = 150_000,
        mtbf_host_h: float = 19_000,
        repair_chip_h: float = 24.0,
        repair_board_h: float = 24.0,
        repair_host_h: float = 24.0,
        hardware: str | Hardware = JOB_HARDWARE,
        **others: object,
    ) -> Assumptions:
        """Return the assumptions for a machine of chips, boards (or None) and hosts; `others` are fields."""
        machine = Mesh(mesh) if isinstance(mesh, str) else mesh
        levels = [
            Level("host", host, mtbf_host_h, repair_host_h),
            Level("chip", (1,) * machine.n_axes, mtbf_chip_h, repair_chip_h),
        ]
        if board is not None:
            levels.insert(1, Level("board", board, mtbf_board_h, repair_board_h))
        return cls(machine, host, tuple(levels), hardware=find_hardware(hardware), **others)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if not self.mesh.is_full:
            raise MeshError(f"A study starts with a whole machine: got {self.mesh}. Leave the failures out.")
        for name, shape in (("host", self.host), *((level.name, level.shape) for level in self.levels)):
            if len(shape) != self.mesh.n_axes or any(n % s for n, s in zip(self.mesh.shape, shape, strict=False)):
                raise MeshError(
                    f"A {name} of {name_shape(shape)} chips does not tile a {name_shape(self.mesh.shape)} mesh."
                )
            if any(h % s for h, s in zip(self.host, shape, strict=True)):
                raise MeshError(
                    f"A host of {name_shape(self.host)} chips is not made of {name}s of {name_shape(shape)}."
                )
        self._fit_larger_parts()
        for field in ("checkpoint_min", "compute_s"):
            if not 0 < getattr(self, field) < math.inf:
                raise ParameterError(f"{field} is {getattr(self, field)}, expected a positive number.")
        for field in (
            *("quick_repair_h", "save_s", "detect_s", "restart_s", "swap_s", "replan_s", "spares", "price"),
            *("crew_price", "payload_bytes", "spare_cubes", "ocs_s", "elastic_s"),
        ):
            if not 0 <= getattr(self, field) < math.inf:
                raise ParameterError(f"{field} is {getattr(self, field)}, expected 0 or more.")
        if self.grow not in GROWS:
            raise ParameterError(f"grow is {self.grow!r}, expected one of: {', '.join(GROWS)}.")

        if not self.copies_s >= 0:
            raise ParameterError(f"copies_s is {self.copies_s}, expected 0 or more.")
        if self.replace_h is not None and not 0 <= self.replace_h < math.inf:
            raise ParameterError(f"replace_h is {self.replace_h}, expected 0 or more.")

    def _fit_larger_parts(self) -> None:
        """Check cubes and slices, and choose those that are not given."""
        sides = CUBES.get(self.mesh.n_axes, (CUBE_SIDE,) * self.mesh.n_axes)
        halves = tuple(n // 2 if axis < 2 else n for axis, n in enumerate(self.mesh.shape))
        for field, given, wanted in (("cube", self.cube, sides), ("slice_shape", self.slice_shape, halves)):
            name = field.removesuffix("_shape")
            if not given:
                object.__setattr__(self, field, _fitting(self.mesh.shape, self.host, wanted))
                continue
            if len(given) != self.mesh.n_axes or any(n % g for n, g in zip(self.mesh.shape, given, strict=True)):
                raise MeshError(
                    f"A {name} of {name_shape(given)} chips does not tile a {name_shape(self.mesh.shape)} mesh."
                )
            if any(g % h for g, h in zip(given, self.host, strict=True)):
                raise MeshError(
                    f"A {name} of {name_shape(given)} chips is not made of hosts of {name_shape(self.host)}."
                )

    @property
    def failures_per_h(self) -> float:
        """Failures per hour of the whole machine, with nothing down."""
        return sum(self.parts(level) / level.mtbf_h for level in self.levels)

    def parts(self, level: Level) -> int:
        """Return how many parts of a level the machine has."""
        return self.mesh.size // math.prod(level.shape)

    def with_rates(self, rates: Sequence[Rates], source: str) -> Assumptions:
        """Return these assumptions with the rates of a log. Parts that it has no rates for never fail by themselves."""
        known = {one.kind: one for one in rates}
        levels = []
        for level in self.levels:
            mtbf_h, repair_h = math.inf, level.repair_h
            if level.name in known:
                mtbf_h = known[level.name].failures.mean_h
                repair_h = known[level.name].repairs.mean_h if known[level.name].repairs.count else repair_h
            levels.append(dataclasses.replace(level, mtbf_h=mtbf_h, repair_h=repair_h))
        return dataclasses.replace(self, levels=tuple(levels), rates_from=source)

    def scaled(self, factor: float) -> Assumptions:
        """Return these assumptions with every mean time between failures scaled."""
        levels = tuple(dataclasses.replace(level, mtbf_h=level.mtbf_h * factor) for level in self.levels)
        return dataclasses.replace(self, levels=levels)


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
