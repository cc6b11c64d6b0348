"""A finding: one thing that works, is absent, or is broken, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["works", "absent", "broken"]
Section = Literal["packages", "engines", "devices"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    `absent` is not installed, which is no fault. `broken` is installed and does not work. Both say what to do in
    `advice`, a command where possible. `seconds` is how long the probe took.
    """

    section: Section
    name: str
    status: Status
    detail: str
    advice: str | None = None
    seconds: float | None = None
