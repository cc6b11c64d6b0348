"""Study: planners against each other, and against the paper. Stands on planning and on cost; neither knows of it."""

from meshmend.study.compare import Comparison, PlannerResult, compare
from meshmend.study.reproduce import Reproduction, reproduce

__all__ = ["Comparison", "PlannerResult", "Reproduction", "compare", "reproduce"]
