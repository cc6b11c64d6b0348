"""Planning: from a mesh to a schedule. One planner per file; `plan` runs one and proves the result."""

from meshmend.planning.auto import Auto, Candidate, Choice, Tuned
from meshmend.planning.base import Planner
from meshmend.planning.cache import PlanCache
from meshmend.planning.derived import Derived
from meshmend.planning.gather import Gather
from meshmend.planning.hamiltonian import Hamiltonian
from meshmend.planning.latency import Latency
from meshmend.planning.proven import PLANNERS, PlanFunction, choose, make_planner, plan
from meshmend.planning.row_pairs import RowPairs
from meshmend.planning.shards import plan_broadcast, plan_halves, plan_shards
from meshmend.planning.step import StepDemands, StepPlan, plan_step
from meshmend.planning.two_color import TwoColor
from meshmend.planning.weave import Weave
from meshmend.planning.workload import Workload, round_payload

__all__ = [
    "PLANNERS",
    "Auto",
    "Candidate",
    "Choice",
    "Derived",
    "Gather",
    "Hamiltonian",
    "Latency",
    "PlanCache",
    "PlanFunction",
    "Planner",
    "RowPairs",
    "StepDemands",
    "StepPlan",
    "Tuned",
    "TwoColor",
    "Weave",
    "Workload",
    "choose",
    "make_planner",
    "plan",
    "plan_broadcast",
    "plan_halves",
    "plan_shards",
    "plan_step",
    "round_payload",
]
