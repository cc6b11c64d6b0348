"""Availability: what each failure policy is worth over months of operation."""

from meshmend_lab.availability.assumptions import Assumptions, Level
from meshmend_lab.availability.policies import POLICIES
from meshmend_lab.availability.simulate import Estimate, Outcome, Study, simulate

__all__ = ["POLICIES", "Assumptions", "Estimate", "Level", "Outcome", "Study", "simulate"]
