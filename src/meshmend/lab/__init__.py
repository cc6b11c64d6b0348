"""A mesh on one machine: a process for each chip, and a network namespace for each process if you are root."""

from meshmend.lab.chips import Chips
from meshmend.lab.namespaces import Lab

__all__ = ["Chips", "Lab"]
