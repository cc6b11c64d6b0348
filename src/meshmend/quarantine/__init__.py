"""Quarantine: what a job knows of chips, cables and hosts that compute wrong numbers or are slow, and leaves out.

A check sees a `Sign`, and `report`s it. The `SignBook` in the job's shared folder holds all of them. The `judge` says
when signs are enough for a `Verdict`. The `QuarantineList` beside the book holds what is left out, until it expires or
somebody clears it. `Stragglers` finds who is slow. Nothing here needs an engine.
"""

from meshmend.quarantine.book import Noted, SignBook, untrusted
from meshmend.quarantine.entries import BY_HAND, THE_JOB, Quarantined, QuarantineList
from meshmend.quarantine.judge import Judge, Verdict
from meshmend.quarantine.report import enforce, report
from meshmend.quarantine.sign import Sign
from meshmend.quarantine.stragglers import Stragglers
from meshmend.quarantine.suspect import Suspect

__all__ = [
    "BY_HAND",
    "THE_JOB",
    "Judge",
    "Noted",
    "QuarantineList",
    "Quarantined",
    "Sign",
    "SignBook",
    "Stragglers",
    "Suspect",
    "Verdict",
    "enforce",
    "report",
    "untrusted",
]
