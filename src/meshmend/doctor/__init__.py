"""Doctor: what is installed here, which engines work, what JAX sees, and how to fix the rest."""

from meshmend.doctor.examine import examine
from meshmend.doctor.packages import Finding, Status

__all__ = ["Finding", "Status", "examine"]
