"""Study: planners compared with each other and with the paper. Uses planning and cost; neither depends on it."""

from meshmend.study.compare import Comparison, PlannerResult, compare
from meshmend.study.reproduce import Reproduction, reproduce

__all__ = ["Comparison", "PlannerResult", "Reproduction", "compare", "reproduce"]
