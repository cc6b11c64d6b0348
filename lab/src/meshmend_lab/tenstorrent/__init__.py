"""Tenstorrent machines: which mesh their runtime opens on what is left of one, and programs for their devices."""

from meshmend_lab.tenstorrent.chip_programs import chip_programs, chip_programs_schema
from meshmend_lab.tenstorrent.compare import RuntimeComparison, compare_with_runtime

__all__ = ["RuntimeComparison", "chip_programs", "chip_programs_schema", "compare_with_runtime"]
