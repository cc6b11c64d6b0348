"""Doctor: what is installed here, which engines really work, what JAX sees, and what to do about the rest."""

from meshmend.doctor.examine import examine
from meshmend.doctor.finding import Finding, Status

__all__ = ["Finding", "Status", "examine"]
