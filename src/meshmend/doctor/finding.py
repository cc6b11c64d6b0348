"""A finding: one thing that works, is absent, or is broken, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["works", "absent", "broken"]
Section = Literal["packages", "engines", "devices"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    `absent` is what can be had and is not here: no fault. `broken` is what is here and does not work. Both say what to
    do in `advice`, a command wherever one will do. `seconds` is how long a trial took.
    """

    section: Section
    name: str
    status: Status
    detail: str
    advice: str | None = None
    seconds: float | None = None
