'''Machines as their own tools describe them: which chips there are, how they are cabled, what is missing.

>>> text = """
... meshmend: 1
... shape: 4x8
... failed: ["2x2@0,0"]
... rates: {"3,0-3,1": 1/2}
... """
>>> machine_of(parse_description(text, "mine.yaml")).mesh
Mesh(4x8 minus 2x2@0,0 with 1 slow cable: 28 of 32 chips)
'''

from meshmend.machines.description import Chip, Description
from meshmend.machines.grid import Grid
from meshmend.machines.layout import ChipLayout, find_layout
from meshmend.machines.machine import Machine, machine_of
from meshmend.machines.read import FORMATS, parse_description, read_description, read_machine

__all__ = [
    "FORMATS",
    "Chip",
    "ChipLayout",
    "Description",
    "Grid",
    "Machine",
    "find_layout",
    "machine_of",
    "parse_description",
    "read_description",
    "read_machine",
]
