"""Availability: what each failure policy is worth over months of operation."""

from meshmend.availability.assumptions import Assumptions, Level
from meshmend.availability.policies import POLICIES
from meshmend.availability.simulate import Estimate, Outcome, Study, simulate

__all__ = ["POLICIES", "Assumptions", "Estimate", "Level", "Outcome", "Study", "simulate"]
