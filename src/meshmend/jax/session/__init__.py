"""Join a round of a job: which hosts there are, where they are, and which plan they run.

`meshmend run` restarts the survivors. `initialize` reads what it has put into the environment, and returns the
`Session`: the fabric of the hosts that joined, and the plan that all of them run.
"""

from meshmend.jax.session.session import Session, initialize
from meshmend.jax.session.single_process import initialize_alone

__all__ = ["Session", "initialize", "initialize_alone"]
