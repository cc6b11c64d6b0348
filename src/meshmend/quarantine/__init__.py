"""Quarantine: what a job knows of chips, cables and hosts that compute wrong numbers, and leaves out.

A check makes an `Observation`, and `report`s it. The `FaultLog` in the job's shared folder holds all of them, and
`judge` says when observations are enough for a `Verdict`. The `QuarantineList` beside it holds what is left out, until
it expires or somebody clears it. Nothing here needs an engine.
"""

from meshmend.quarantine.entries import BY_HAND, THE_JOB, Quarantined, QuarantineList
from meshmend.quarantine.fault_log import FaultLog, LogEntry, untrusted
from meshmend.quarantine.judge import Verdict
from meshmend.quarantine.observation import Observation
from meshmend.quarantine.report import enforce, report
from meshmend.quarantine.suspect import Suspect

__all__ = [
    "BY_HAND",
    "THE_JOB",
    "FaultLog",
    "LogEntry",
    "Observation",
    "QuarantineList",
    "Quarantined",
    "Suspect",
    "Verdict",
    "enforce",
    "report",
    "untrusted",
]
