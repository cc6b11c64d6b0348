"""Join a round of a job: which hosts there are, where they are, and which plan they run.

`meshmend run` restarts the survivors. `initialize` reads what it has put into the environment, and returns the
`Session`: the fabric of the hosts that joined, and the plan that all of them run.

At 2,240 hosts each question to all processes costs about a second, so a job asks few. In their order, and why each is
needed (`tell` is not a question: process 0 says what only it knows):

    hosts        Which host are you?                    only without `meshmend run`, which knows
    quarantine   What is your failure domain?           process 0's quarantine list and all domains make the fabric,
                                                        which everything after depends on
    (hardware)                                          tell: what process 0 has on file of the links' speed
    settings     What is your job, which plan have you? the first time that the script's own arguments are known; a
                                                        plan is for them, and whoever lacks it is sent it
    compile      Have you loaded the plan's program?    processes that load and processes that compile would wait for
                                                        each other for ever
    have, ...    What have you kept?                    one to four questions of the recovery, see `state.recovery`
    params       What do you begin with?                only where nothing was kept: the initial values are compared
"""

from meshmend.jax.session.session import Session, initialize
from meshmend.jax.session.single_process import initialize_alone

__all__ = ["Session", "initialize", "initialize_alone"]
