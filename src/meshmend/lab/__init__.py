"""A mesh on one machine: one process per chip, and one network namespace per process if you are root."""

from meshmend.lab.chips import Chips
from meshmend.lab.inventory import FoundLab, find_labs, take_down, take_down_all
from meshmend.lab.namespaces import Lab

__all__ = ["Chips", "FoundLab", "Lab", "find_labs", "take_down", "take_down_all"]
