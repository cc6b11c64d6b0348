"""Availability: what each answer to a failure is worth over months of operation. Needs simpy to run."""

from meshmend.availability.answers import ANSWERS
from meshmend.availability.assumptions import Assumptions, Level
from meshmend.availability.simulate import Estimate, Outcome, Study, simulate

__all__ = ["ANSWERS", "Assumptions", "Estimate", "Level", "Outcome", "Study", "simulate"]
