"""State: all that the page asks about, in the words of the command line.

The page sends it as JSON, keeps it in its address, and shows the command that asks the same. Whatever the page sends is
checked here before any work is done: types, lengths, the number of chips, and that hardware is a preset. Elsewhere it
may be a file as well; a page must not make this machine open one.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import quote, urlencode

from meshmend.cost import DEFAULT_HARDWARE, PRESETS, Hardware
from meshmend.cost.units import parse_bytes
from meshmend.errors import ParameterError
from meshmend.planning import Auto, Planner, make_planner
from meshmend.topology import Mesh, name_cable, name_cable_rates, name_shape, parse_cable_rate, parse_shape, parse_wrap

MAX_CHIPS = 2048
"""32×64: what the page draws at once, and what is planned while somebody waits."""
MAX_WORD = 64
MAX_LIST = 2 * 3 * MAX_CHIPS
"""Every cable of a mesh of three axes, twice."""
MAX_BUDGET_S = 10.0
QUICK_BUDGET_S = 0.5
"""CPU seconds of planning for an answer that comes while somebody waits."""


@dataclass(frozen=True)
class State:
    """A machine, what has failed, and what to plan for: each field is an option of `meshmend plan`.

    >>> state = State(shape="8x8", fail=("2x2@2,2",))
    >>> state.mesh
    Mesh(8x8 minus 2x2@2,2: 60 of 64 chips)
    >>> State.read({"shape": "8x8", "fail": ["2x2@2,2"]}) == state
    True
    >>> state.fragment
    'shape=8x8&fail=2x2@2,2'
    """

    shape: str = "8x8"
    wrap: str = "none"
    fail: tuple[str, ...] = ()
    fail_cable: tuple[str, ...] = ()
    cable_rate: tuple[str, ...] = ()
    hardware: str = DEFAULT_HARDWARE
    payload: str = "100MB"
    planner: str = Auto.name
    budget: float = QUICK_BUDGET_S

    def __post_init__(self) -> None:
        if self.hardware not in PRESETS:
            raise ParameterError(
                f"The studio has no hardware {_brief(self.hardware)}, and opens no files. Choose one of its presets: "
                f"{', '.join(PRESETS)}; or plan on a terminal, where --hardware takes files."
            )

    @classmethod
    def read(cls, given: object) -> State:
        """Return the state that the page sent, or raise an error that says what is wrong with it."""
        if not isinstance(given, Mapping):
            raise ParameterError(f"The state is {_brief(given)}, expected an object with the fields {_NAMES}.")
        unknown = [key for key in given if key not in _FIELDS]
        if unknown:
            raise ParameterError(f"The state has no field {_brief(unknown[0])}: it has {_NAMES}.")
        return cls(**{key: _checked(key, value) for key, value in given.items()})

    @classmethod
    def of(cls, mesh: Mesh, **others: Any) -> State:
        """Return the state of a mesh, with its holes as boxes."""
        wraps = [str(axis) for axis, wrapped in enumerate(mesh.wrap) if wrapped]
        slow = {cable: rate for cable, rate in mesh.whole.cable_rates.items() if cable not in mesh.failed_cables}
        return cls(
            shape=name_shape(mesh.shape),
            wrap="none" if not wraps else "all" if len(wraps) == mesh.n_axes else ",".join(wraps),
            fail=tuple(str(hole) for hole in mesh.holes),
            fail_cable=tuple(name_cable(cable) for cable in mesh.failed_cables),
            cable_rate=tuple(name_cable_rates(slow)),
            **others,
        )

    @cached_property
    def mesh(self) -> Mesh:
        """The machine with its failures."""
        machine = whole_machine(self.shape, self.wrap)
        return machine.with_failures(self.fail, self.fail_cable, map(parse_cable_rate, self.cable_rate))

    @property
    def payload_bytes(self) -> float:
        """The payload in bytes."""
        n_bytes = parse_bytes(self.payload)
        if not n_bytes > 0:
            raise ParameterError(f"The payload is {self.payload!r}, expected more than 0 bytes, as in 100MB.")
        return n_bytes

    @property
    def chosen_hardware(self) -> Hardware:
        """The hardware's preset."""
        return PRESETS[self.hardware]

    def made_planner(self, name: str | None = None) -> Planner:
        """Return the planner, or another one, tuned for the payload on the hardware."""
        return make_planner(
            name or self.planner,
            payload_bytes=self.payload_bytes,
            hardware=self.chosen_hardware,
            budget_s=self.budget,
        )

    @property
    def fragment(self) -> str:
        """The state as the fragment of the page's address: what differs from the defaults, and the shape."""
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "shape" or value != field.default:
                values = value if isinstance(value, tuple) else (f"{value:g}" if field.name == "budget" else value,)
                words += [(field.name.replace("_", "-"), one) for one in values]
        return urlencode(words, quote_via=quote, safe=",@=/")

    @property
    def command(self) -> str:
        """The command that asks for the same on a terminal.

        >>> State(shape="8x8", fail=("2x2@2,2",), budget=10).command
        'meshmend plan 8x8 --fail 2x2@2,2 --payload 100MB --hardware tpu-v3'
        """
        words = ["meshmend", "plan", self.shape, *([] if self.wrap == "none" else ["--wrap", self.wrap])]
        for option in ("fail", "fail_cable", "cable_rate"):
            for text in getattr(self, option):
                words += [f"--{option.replace('_', '-')}", text]
        budget = "" if self.budget == MAX_BUDGET_S else f":budget_s={self.budget:g}"
        words += ["--planner", self.planner + budget] if budget or self.planner != Auto.name else []
        return shlex.join([*words, "--payload", self.payload, "--hardware", self.hardware])


def whole_machine(shape: str, wrap: str) -> Mesh:
    """Return the machine with nothing failed, if it is not too large for the page."""
    if len(shape) > MAX_WORD or len(wrap) > MAX_WORD:
        raise ParameterError(f"A shape and its wrap are at most {MAX_WORD} characters, as in 16x32 and 0,1.")
    sides = parse_shape(shape)
    if math.prod(sides) > MAX_CHIPS:
        raise ParameterError(
            f"A {name_shape(sides)} mesh has {math.prod(sides):,} chips; the studio shows up to {MAX_CHIPS:,}. "
            f"Choose a smaller shape, or plan it on a terminal: meshmend plan {name_shape(sides)}"
        )
    return Mesh(sides, wrap=parse_wrap(wrap, len(sides), given=f"wrap {wrap}:"))


_FIELDS = {field.name: field for field in dataclasses.fields(State)}
_NAMES = ", ".join(_FIELDS)


def _checked(key: str, value: Any) -> Any:
    default = _FIELDS[key].default
    if isinstance(default, tuple):
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > MAX_LIST:
            raise ParameterError(f"{key} is {_brief(value)}, expected a list of at most {MAX_LIST:,} texts.")
        return tuple(_word(key, one) for one in value)
    if isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_BUDGET_S:
            raise ParameterError(f"{key} is {_brief(value)}, expected CPU seconds, above 0 and up to {MAX_BUDGET_S:g}.")
        return float(value)
    return _word(key, value)


def _word(key: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_WORD or not value.isprintable():
        raise ParameterError(f"{key} has {_brief(value)}, expected a text of at most {MAX_WORD} characters.")
    return value


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_WORD else text[:MAX_WORD] + " …"
