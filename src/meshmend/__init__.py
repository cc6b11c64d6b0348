"""meshmend keeps data-parallel training running on mesh-connected chips when chips fail.

>>> import meshmend as mm
>>> mesh = mm.Mesh((8, 8), failed=[mm.Region(at=(2, 2), shape=(2, 2))])
>>> schedule = mm.plan(mesh, payload_bytes=1e8, hardware="tpu-v3")     # the fastest plan, proven
>>> schedule.mesh.n_chips
60

Packages, and the rooms inside `jax`. Each imports itself and lines above it, and nothing else:

    topology: chips, holes and the cables that are left
    machines, routing: descriptions of machines; routes between chips
    schedule: steps of transfers, and their proof
    cost, numpy: how long a schedule takes; the reference engine
    planning, drawing: planners; pictures of what they make
    quarantine: what is left out for its wrong numbers
    launch: jobs that survive the failure of hosts
    meshmend: the names that most programs need
    jax, torch: engines to train with, and jobs on them
    doctor: a look at what is installed
    cli: the command line

    jax/engine: run a schedule
    jax/train: one train step
    jax/data: which samples a step uses
    jax/session: join a round of a job
    jax/state: keep a state and restore it; in it layout, memory and disk, in this order
    jax/compile: compile before it is needed
    jax/checks: find chips that compute wrong numbers
    jax/job: all of it in one object
"""

from meshmend.cost import Forecast, Hardware, bound, predict
from meshmend.drawing import draw
from meshmend.errors import MeshmendError, PlanError, VerificationError
from meshmend.extras import own_version
from meshmend.planning import plan
from meshmend.schedule import Collective, Op, Schedule
from meshmend.schedule.serialize import load, save
from meshmend.schedule.verify import Proof, verify
from meshmend.topology import Mesh, Region

__version__ = own_version()

__all__ = [
    "Collective",
    "Forecast",
    "Hardware",
    "Mesh",
    "MeshmendError",
    "Op",
    "PlanError",
    "Proof",
    "Region",
    "Schedule",
    "VerificationError",
    "bound",
    "draw",
    "load",
    "plan",
    "predict",
    "save",
    "verify",
]
