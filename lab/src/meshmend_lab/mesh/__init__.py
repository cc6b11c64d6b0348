"""A mesh on one machine: one network namespace per chip, and one rate-limited cable per pair of neighbours."""

from meshmend_lab.mesh.inventory import FoundLab, find_labs, take_down, take_down_all
from meshmend_lab.mesh.namespaces import Lab

__all__ = ["FoundLab", "Lab", "find_labs", "take_down", "take_down_all"]
