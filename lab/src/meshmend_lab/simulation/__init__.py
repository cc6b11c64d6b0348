"""Whole jobs, simulated from a seed: the product's own decisions, with clock, network, disk and processes replaced.

A seed says everything: how large a job is, how fast its parts are, which faults come when, and in which order messages
arrive. So a job that breaks a promise does so again, and can be told as a story. Real code, driven by one queue of
events: `Membership` (the store's decisions), `Conversation` and `supervise` (a host's), `recover` with `StateSearch`
(which state all resume from), `place_on` (who keeps what), `HostMemory`'s rule of which copies go, `Preserved` (which
checkpoints go). What is not real, and which tests have the real thing:

| simulated | how | real in |
|---|---|---|
| bytes on sockets, HMACs, the store's limits | messages, in order in each direction | tests/launch/test_store.py |
| threads of a member and an agent | events of one actor | tests/launch/test_agent.py, tests/jax_restart/test_agent.py |
| processes of workers, signals | a code, and a moment until it is there | tests/jax_restart/test_interrupts.py |
| a train step, compiling, planning | seconds | tests/jax_restart/test_job.py, test_soak.py |
| JAX's coordination service | messages to process 0 and back | tests/jax_engine/session |
| parts of copies, checksums | numbers of parts, and which are damaged | tests/jax_engine/state/test_damage.py |
| a collective that sends what hosts lack | a moment in which all must live | tests/jax_engine/state/test_recovery.py |
| Orbax's checkpoints, claims | a table that may hang, be full, lose writes | tests/jax_engine/state/test_hung_disk.py |
| when copies are due | every so many steps; one that is late is left out | tests/jax_engine/state/test_timetable.py |
| events on their way to the store | nothing | tests/launch/test_delivery.py |
"""

from meshmend_lab.simulation.campaign import Campaign, replay, shrink
from meshmend_lab.simulation.job import Outcome, SimulatedJob
from meshmend_lab.simulation.plan import Fault, Plan, draw
from meshmend_lab.simulation.referee import Violation

__all__ = ["Campaign", "Fault", "Outcome", "Plan", "SimulatedJob", "Violation", "draw", "replay", "shrink"]
