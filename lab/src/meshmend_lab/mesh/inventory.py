"""The labs on this machine, complete or not: found by their journals and their namespaces, and removed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from meshmend.topology import Mesh
from meshmend_lab.errors import LabError
from meshmend_lab.mesh import namespaces
from meshmend_lab.mesh.commands import listed_namespaces
from meshmend_lab.mesh.journal import Journal, journal_names

Condition = Literal["up", "being built", "half-built", "orphaned", "damaged"]


@dataclass(frozen=True)
class FoundLab:
    """A lab, or what is left of one.

    `condition` is `up` if it is complete; `being built` (or changed) by a live process; `half-built` if that process
    has ended, or if some namespaces are missing; `orphaned` if it has no journal or
    no process; `damaged` if its journal cannot be read. `mesh`, `rate`, `delay` and `pid` are
    what the journal says, None where it says nothing.
    """

    name: str
    condition: Condition
    namespaces: tuple[str, ...]
    mesh: Mesh | None = None
    rate: str | None = None
    pid: int | None = None
    delay: str | None = None

    @property
    def n_namespaces(self) -> int | None:
        """How many namespaces a complete lab of this kind has: one per chip, and one more for a delay."""
        return None if self.mesh is None else self.mesh.n_chips + (self.delay is not None)


def find_labs() -> list[FoundLab]:
    """Return every lab on this machine, and everything that has a lab's name, in order of name."""
    there: dict[str, list[str]] = {name: [] for name in journal_names()}
    for namespace in listed_namespaces(namespaces.PREFIX):
        rest = namespace.removeprefix(namespaces.PREFIX)
        match = re.fullmatch(rf"([a-z][a-z0-9]{{0,15}}){namespaces.ENDING}", rest, re.ASCII)
        there.setdefault(match[1] if match else rest, []).append(namespace)
    return [_look_at(name, tuple(found)) for name, found in sorted(there.items())]


def _look_at(name: str, there: tuple[str, ...]) -> FoundLab:
    try:
        record = Journal.read(name)
    except LabError:
        return FoundLab(name, "damaged", there)
    if record is None:
        return FoundLab(name, "orphaned", there)
    found = FoundLab(name, "up", there, record.mesh, record.rate, record.pid, record.delay)
    condition: Condition
    if record.stage != "up":
        condition = "being built" if record.process_lives else "half-built"
    elif record.temporary and not record.process_lives:
        condition = "orphaned"
    elif len(there) != found.n_namespaces:
        condition = "half-built"
    else:
        condition = "up"
    return replace(found, condition=condition)


def take_down(name: str) -> FoundLab:
    """Remove a lab in any condition, and return what it was. Nothing else is touched."""
    namespaces.check_name(name)
    namespaces.check_root()
    found = next((lab for lab in find_labs() if lab.name == name), None)
    if found is None:
        raise LabError(f"No lab named {name} is up; `meshmend lab mesh list` shows those that are.")
    namespaces.remove(name)
    return found


def take_down_all() -> list[FoundLab]:
    """Remove every lab and every namespace that has a lab's prefix; return what was there."""
    namespaces.check_root()
    found = find_labs()
    errors = []
    for lab in found:
        try:
            namespaces.remove(lab.name)
        except LabError as error:
            errors.append(str(error))
    if errors:
        raise LabError(f"{len(found) - len(errors)} of {len(found)} labs are down. {' '.join(errors)}")
    return found
