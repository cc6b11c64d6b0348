"""Quarantine: what a job knows of chips, cables and hosts that compute wrong numbers or are slow, and leaves out.

A check reports a `Sign`. The `Judge` says when signs are enough for a `Verdict`. The `QuarantineList` in the job's
shared folder holds what is left out, until it expires or somebody clears it. `Stragglers` finds who is slow.
Nothing here needs an engine.
"""

from meshmend.quarantine.checks import Checks
from meshmend.quarantine.entries import BY_HAND, THE_JOB, Quarantined, QuarantineList
from meshmend.quarantine.judge import Judge, Verdict
from meshmend.quarantine.sign import Sign
from meshmend.quarantine.stragglers import Stragglers
from meshmend.quarantine.suspect import Suspect

__all__ = ["BY_HAND", "THE_JOB", "Checks", "Judge", "QuarantineList", "Quarantined", "Sign", "Stragglers", "Suspect", "Verdict"]
