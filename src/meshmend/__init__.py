"""meshmend keeps data-parallel training running on mesh-connected chips when chips fail.

>>> import meshmend as mm
>>> mesh = mm.Mesh((8, 8), failed=[mm.Region(at=(2, 2), shape=(2, 2))])
>>> schedule = mm.plan(mesh, payload_bytes=1e8, hardware="tpu-v3")     # the fastest plan, proven
>>> schedule.mesh.n_chips
60
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
