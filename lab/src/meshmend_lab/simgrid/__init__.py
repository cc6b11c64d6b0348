"""SimGrid, an independent simulator of networks, as the referee of predictions."""

from meshmend_lab.simgrid.simulation import INTERPRETER_VARIABLE, is_available, simulate, simulate_arrivals, version

__all__ = ["INTERPRETER_VARIABLE", "is_available", "simulate", "simulate_arrivals", "version"]
