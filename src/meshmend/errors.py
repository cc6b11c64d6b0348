"""Every error that meshmend raises on purpose, in one tree.

Messages say what, where, expected, got and what to do next; the same facts are fields of the exception,
so that a program can act on them without parsing text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

__all__ = [
    "CacheWarning",
    "CollectiveError",
    "CollisionError",
    "Coordinate",
    "DeadPathError",
    "DeadlockError",
    "DisagreementError",
    "DrawingError",
    "LaunchError",
    "LayoutError",
    "LostChipError",
    "MachineError",
    "MeshError",
    "MeshmendError",
    "MissingExtraError",
    "ParameterError",
    "PayloadError",
    "PlanError",
    "QuarantineError",
    "RendezvousError",
    "RestartError",
    "RoutingError",
    "ScheduleError",
    "ScheduleFileError",
    "TransientError",
    "UpdateError",
    "VerificationError",
    "VersionError",
    "WaitTimeoutError",
    "WrongSumError",
]

Coordinate = tuple[int, ...]
"""A chip's coordinate in the mesh; `(row, column)` in 2-D."""


class MeshmendError(Exception):
    """The root of the tree: catch this to catch everything meshmend raises on purpose.

    An error can cross to another process: pickled and copied, it keeps its type, its message and its fields, whatever
    the arguments of its constructor are.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, unpickling calls the constructor with the message alone, which most of these do not accept.
        return made_again, (type(self), self.args, dict(self.__dict__))


def made_again(kind: type[MeshmendError], args: tuple[Any, ...], fields: dict[str, Any]) -> MeshmendError:
    """Return an error as it was in another process."""
    error = kind.__new__(kind, *args)
    super(MeshmendError, error).__init__(*args)  # that of ValueError, ImportError, …
    error.__dict__.update(fields)
    return error


class MeshError(MeshmendError, ValueError):
    """The description of a mesh, a hole or a cable is invalid."""


@dataclass(eq=False, repr=False)
class MachineError(MeshmendError, ValueError):
    """The description of a machine cannot be read; nothing in it was executed.

    Fields, each None where it does not apply: `file`, `line` (counted from 1), `expected`, `got`.
    """

    message: InitVar[str]
    _: KW_ONLY
    file: str | None = None
    line: int | None = None
    expected: str | None = None
    got: str | None = None


class LayoutError(MeshmendError, ValueError):
    """The cables of a machine do not say where its chips are.

    Field `why`: "ambiguous", "not a mesh", "in parts", "too large" or "nothing".
    """

    def __init__(self, message: str, why: str) -> None:
        self.why = why
        super().__init__(message)


class ScheduleError(MeshmendError, ValueError):
    """A schedule's arrays do not fit each other or their mesh."""


class ScheduleFileError(MeshmendError, ValueError):
    """A file is damaged or is not a schedule; nothing in it was executed."""


class CacheWarning(UserWarning):
    """A plan cache entry is damaged, or a plan cannot be stored. The plan is made again instead."""


class ParameterError(MeshmendError, ValueError):
    """A parameter has an invalid value or an unknown name."""


class MissingExtraError(MeshmendError, ImportError):
    """An optional dependency is not installed.

    Fields: `needed_for`, `missing` (its name), `install` (a command that installs it; see `install_hint`).
    """

    def __init__(self, needed_for: str, missing: str, install: str) -> None:
        self.needed_for = needed_for
        self.missing = missing
        self.install = install
        super().__init__(f"{needed_for} needs {missing}, which is not installed here. Install it with: {install}")


class VersionError(MeshmendError, ImportError):
    """A library is installed in a version in which meshmend does not find what it needs.

    Fields: `library`, `version`, `missing` (names that are not there any more, or not yet).
    """

    def __init__(self, needed_for: str, library: str, version: str, missing: Sequence[str], tested: str) -> None:
        self.library = library
        self.version = version
        self.missing = tuple(missing)
        super().__init__(
            f"{needed_for} does not work with {library} {version}, which lacks {', '.join(self.missing)}. It was "
            f"tested with {library} {tested}. Install one of those, or a newer meshmend; and please report the version."
        )


class DrawingError(MeshmendError, ValueError):
    """A schedule cannot be drawn, or not in the chosen format."""


class PlanError(MeshmendError):
    """A planner cannot serve a mesh.

    Fields: `planner` (its name), `mesh_name`, `why`, `alternatives` (planners that can serve this mesh; also empty
    where None was passed because the others were not tried).
    """

    def __init__(self, planner: str, mesh_name: str, why: str, alternatives: Sequence[str] | None = ()) -> None:
        self.planner = planner
        self.mesh_name = mesh_name
        self.why = why
        self.alternatives = tuple(alternatives or ())
        if self.alternatives:
            advice = f" Planners that can serve this mesh: {', '.join(self.alternatives)}."
        elif alternatives is None:
            advice = ""
        else:
            advice = " No other planner here can serve this mesh either."
        super().__init__(f"{planner} cannot plan for {mesh_name}: {why}{advice}")


@dataclass(eq=False, repr=False)
class RoutingError(MeshmendError):
    """A route table cannot be built, or does not meet its requirements.

    Fields, each None where it does not apply: `scheme` (its name), `src` and `dst` (coordinates).
    """

    message: InitVar[str]
    _: KW_ONLY
    scheme: str | None = None
    src: Coordinate | None = None
    dst: Coordinate | None = None


class DeadlockError(RoutingError):
    """Packets can deadlock: they can wait for each other in a cycle.

    Field `cycle`: the channels of the cycle in order, each as (from chip, to chip, virtual channel); each waits
    for the next, and the last for the first.
    """

    def __init__(self, message: str, *, scheme: str, cycle: Sequence[tuple[Coordinate, Coordinate, int]]) -> None:
        self.cycle = tuple(cycle)
        super().__init__(message, scheme=scheme)


@dataclass(eq=False, repr=False)
class VerificationError(MeshmendError):
    """A schedule is not what it claims to be.

    Fields, each None where it does not apply: `step`, `src` and `dst` (coordinates), `chunk`, `expected`, `got`.
    """

    message: InitVar[str]
    _: KW_ONLY
    step: int | None = None
    src: Coordinate | None = None
    dst: Coordinate | None = None
    chunk: int | None = None
    expected: str | None = None
    got: str | None = None


class WrongSumError(VerificationError):
    """A chip ends with a chunk that is not the sum (or the copy) that the collective requires."""


class UpdateError(VerificationError):
    """A chunk is not updated at its owner: some chip would end with another value than the one that is put there."""


class CollisionError(VerificationError):
    """Two transfers write the same chunk of the same chip in the same step."""


class DeadPathError(VerificationError):
    """A transfer has no live path: it starts at, ends at or passes through a failed chip or cable."""


class LaunchError(MeshmendError, RuntimeError):
    """A job cannot be launched: its store cannot be reached or refuses a host, or an option contradicts another.

    Also raised by `meshmend.launch.Chips` where the process of a chip fails.
    """


class RestartError(MeshmendError, RuntimeError):
    """A job cannot continue: its hosts are inconsistent, or its saved state is unusable.

    Fields, each None where it does not apply: `host` (its number), `step`.
    """

    def __init__(self, message: str, *, host: int | None = None, step: int | None = None) -> None:
        self.host = host
        self.step = step
        super().__init__(message)


class TransientError(RestartError):
    """The cause may be gone at the next start: another process is dead or silent, a port is taken."""


class QuarantineError(MeshmendError, RuntimeError):
    """A quarantine list is damaged, lacks what is asked for, or needs an operator's approval to grow."""


class LostChipError(MeshmendError, RuntimeError):
    """A chip stopped responding during a collective, so this chip's payload is invalid.

    Fields: `chip` is this one, `peer` the neighbour it was waiting for, which may itself be waiting for the lost chip.
    `lost` is the chip that is dead or frozen, None where that is not known; `mesh_name` and `why` say the rest.
    """

    def __init__(
        self, chip: Coordinate, peer: Coordinate, mesh_name: str, why: str, *, lost: Coordinate | None = None
    ) -> None:
        self.chip = chip
        self.peer = peer
        self.mesh_name = mesh_name
        self.why = why
        self.lost = lost
        known = "" if lost is None else f"chip {name_chip(lost)} is lost. This chip "
        super().__init__(
            f"Chip {name_chip(chip)} gave up a collective on {mesh_name}: {known}expected data from or to "
            f"{name_chip(peer)}, got: {why}. Discard the payload, form the group again with the chips that respond, "
            "and redo the step."
        )


class RendezvousError(MeshmendError, RuntimeError):
    """The members of a new quorum did not all meet: some have died since they asked for it. No step was begun."""


class DisagreementError(MeshmendError, RuntimeError):
    """Members of a process group passed different plans or payloads to the same call. No data was sent.

    Field `calls`: what each member was about to do, by its rank in the group. It is the same on every member.
    """

    def __init__(self, calls: Sequence[str]) -> None:
        self.calls = tuple(calls)
        callers: dict[str, list[int]] = {}
        for rank, word in enumerate(self.calls):
            callers.setdefault(word, []).append(rank)
        groups = []
        # The largest group of equal members first; among groups of equal size, the one with the lowest rank.
        for word, ranks in sorted(callers.items(), key=lambda item: (-len(item[1]), item[1])):
            some = ", ".join(map(str, ranks[:8])) + f" and {len(ranks) - 8} others" * (len(ranks) > 8)
            groups.append(f"rank{'s' * (len(ranks) > 1)} {some}: {word}")
        super().__init__(
            f"The members of the process group do not call the same thing. {'; '.join(groups)}. Every member needs the "
            f"same plan and version, and the same calls in the same order with equal shapes, dtypes and operations. "
            f"No data was sent, and the group is intact."
        )


class PayloadError(MeshmendError, TypeError):
    """A tensor that an engine cannot reduce. Nothing was sent.

    Fields: `expected`, `got`.
    """

    def __init__(self, expected: str, got: str, advice: str) -> None:
        self.expected = expected
        self.got = got
        super().__init__(f"The engine needs {expected}, got {got}. {advice}")


class CollectiveError(MeshmendError, RuntimeError):
    """Arguments that a process group refuses, before anything was sent. torch's own raise a `RuntimeError` too."""


class WaitTimeoutError(MeshmendError, TimeoutError, RuntimeError):
    """A wait timed out before its collective finished; the collective is still running.

    Field `waited_s`.
    """

    def __init__(self, message: str, *, waited_s: float) -> None:
        self.waited_s = waited_s
        super().__init__(message)


def name_chip(chip: Sequence[int]) -> str:
    """Format a coordinate as all messages do.

    >>> name_chip((6, 8))
    '(6,8)'
    """
    return "(" + ",".join(str(int(x)) for x in chip) + ")"
