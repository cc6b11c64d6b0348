"""One simulated job: its hosts, its store, its disk, and the faults that a seed has drawn for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshmend.launch.member import GONE_S, Assignment
from meshmend_lab.simulation.faults import inject
from meshmend_lab.simulation.host import SimulatedHost
from meshmend_lab.simulation.kernel import Actor, Queue
from meshmend_lab.simulation.network import Message, Network
from meshmend_lab.simulation.plan import Plan
from meshmend_lab.simulation.referee import Referee, Violation, WatchedMembership
from meshmend_lab.simulation.storage import SimulatedCopy, SimulatedDisk
from meshmend_lab.simulation.store import SimulatedStore
from meshmend_lab.simulation.training import SimulatedWorker, Training

CALM_S = 400.0
"""Within so long after the last fault, a job with enough hosts trains again; and within as long again, it ends."""
MOST_EVENTS = 40_000_000
SHOWN = ("type", "why", "number", "hosts", "running", "lost", "ok")


@dataclass
class Outcome:
    """What came of one job."""

    seed: int
    n_hosts: int
    n_faults: Counter[str]
    violation: Violation | None
    over: Message | None
    n_events: int
    simulated_s: float
    steps: int
    n_splits: int
    recovered_s: list[float] = field(repr=False)
    """Seconds from the loss of a host that trained to the next step, of each recovery."""


class SimulatedJob:
    """A job that runs in a queue of events. `show` is called with each line of its story: time, who, what."""

    def __init__(self, plan: Plan, show: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.queue = Queue(plan.seed)
        self.network = Network(self.queue, plan.latency_s)
        self.disk = SimulatedDisk()
        self.memories: dict[int, dict[str, SimulatedCopy]] = defaultdict(dict)
        self.hosts: dict[int, SimulatedHost] = {}
        self.store: SimulatedStore | None = None
        self.trainings: dict[str, Training] = {}
        self.referee = Referee(self)
        self.clocks: defaultdict[int, float] = defaultdict(float)
        self.slow: dict[int, float] = {}
        self.trouble_until: defaultdict[int, float] = defaultdict(float)
        """Until when a fault keeps a host from being heard."""
        self.died_at: dict[int, float] = {}
        self.round_at = 0.0
        self.observations: list[list[int]] = []
        self.excuses: set[str] = set()
        """Why this job may end as a failure."""
        self.n_faults: Counter[str] = Counter()
        self.rounds_noted = 0
        """The newest round that is in the store's folder."""
        self.is_calm = self.finished = self.has_deleted = self.starts_over = False
        self.n_started_over = 0
        self.total = plan.total
        self.last_step, self.last_step_at = 0, 0.0
        self.over: Message | None = None
        self.over_at = 0.0
        self._n_names = 0
        self._show = show

    def run(self) -> Outcome:
        """Run the job to its end; return what came of it, with the first violation."""
        violation = None
        try:
            self._run()
        except Violation as found:
            violation = found
        return Outcome(
            self.plan.seed,
            self.plan.n_hosts,
            self.n_faults,
            violation,
            self.over,
            self.queue.n_events,
            self.queue.now - 1000.0,
            self.last_step,
            self.referee.n_splits,
            self.referee.recovered_s,
        )

    def _run(self) -> None:
        self.boot_store()
        for number in range(self.plan.n_hosts):
            self.later(5.0 * self.queue.rng.random(), self.boot_host, number)
        for fault in self.plan.faults:
            self.later(fault.at, inject, self, fault)
        self.later(self.plan.fault_s, self._settle)
        while self.over is None or any(not host.is_dead for host in self.hosts.values()):
            if not self.queue.step():
                break
            if self.queue.n_events > MOST_EVENTS:
                raise Violation("liveness", f"{MOST_EVENTS} events, and no end")

    # What is around the actors.

    def later(self, seconds: float, do: Callable[..., Any], *args: Any) -> None:
        """Have something happen to the world."""
        self.queue.at(self.queue.now + seconds, None, do, *args)

    def tell(self, who: str, what: str, message: Message | None = None) -> None:
        """Add a line to the story, if somebody reads it."""
        if self._show is not None:
            facts = {name: message[name] for name in SHOWN if message.get(name)} if message is not None else {}
            text = ": " + ", ".join(f"{name}={value}" for name, value in facts.items()) if facts else ""
            self._show(f"{self.queue.now - 1000.0:9.3f} s  {who:>8}  {what}{text}")

    def make_membership(self, **settings: Any) -> WatchedMembership:
        """Return the store's membership, whose rounds have names in the order of their start."""
        membership = WatchedMembership(make_name=self._make_name, **settings)
        membership.referee = self.referee
        return membership

    def _make_name(self) -> str:
        self._n_names += 1
        return f"{self._n_names:04d}"

    def n_blocks(self, n_hosts: int) -> int:
        """Return into how many blocks the replicated state is cut."""
        return max(1, min(self.plan.n_blocks, n_hosts // 2))

    def domains_of(self, hosts: tuple[int, ...]) -> tuple[str, ...]:
        """Return the failure domains of a round's hosts."""
        names = [self.plan.domains[host] for host in hosts] if self.plan.domains else []
        return tuple(str(names.index(name)) for name in names)  # so that what is alike is placed once

    def slowness(self, host: int) -> float:
        """Return how many times as long a host takes for its work."""
        return self.slow.get(host, 1.0)

    def start_s(self) -> float:
        """Return how long a worker takes to start."""
        return self.plan.worker_s * (0.1 + self.queue.rng.random())

    def compile_s(self) -> float:
        """Return how long a job takes from its restored state to its first step."""
        return self.plan.compile_s * (1 / 15 + self.queue.rng.random())

    def untrusted(self) -> list[list[int]] | None:
        """Return what checks have found, None where nothing checks the job."""
        return [list(pair) for pair in self.observations] if self.plan.is_checked else None

    def trouble(self, host: int, seconds: float) -> None:
        """Note that a fault keeps a host from being heard for so long."""
        self.trouble_until[host] = max(self.trouble_until[host], self.queue.now + seconds)

    # Life and death.

    def boot_store(self) -> None:
        """Start a store, unless one is there or the job is over."""
        if self.over is not None or (self.store is not None and not self.store.is_dead):
            return
        self.network.store_is_off = False
        self.store = SimulatedStore(self, rounds_before=self.rounds_noted if self.plan.has_folder else 0)
        self.tell("store", "starts")

    def stop_store(self, seconds: float, *, quietly: bool = False) -> bool:
        """Kill the store, or switch its machine off, for so long; return whether there was one."""
        if self.store is None or self.store.is_dead:
            return False
        self.rounds_noted = max(self.rounds_noted, self.store.membership.number)
        self.store.stop(quietly=quietly)
        self.network.store_is_off = quietly
        self.later(seconds, self.boot_store)
        return True

    def store_ends(self, store: SimulatedStore) -> None:
        """End the job, when the store has told those hosts that it could."""
        self.over, self.over_at = store.membership.over, self.queue.now
        self.tell("store", "ends", self.over)
        store.stop(quietly=False)
        if not self.is_calm and self.over is not None and self.over["why"].find("Nothing") >= 0:
            self._start_over()
            return
        self._settle()
        self.later(CALM_S + GONE_S, self._check_ended)

    def _start_over(self) -> None:
        """Start the job again on purpose, as people do after an error that nothing can be restored."""
        self.tell("job", "is started again, to begin anew")
        self.over, self.starts_over = None, True
        self.n_started_over += 1
        if self.store is not None:
            self.rounds_noted = max(self.rounds_noted, self.store.membership.number)
        self.later(1.0, self.boot_store)
        for number in range(self.plan.n_hosts):
            self.later(1.0 + self.queue.rng.random(), self._kill_host, number)
            self.later(2.0 + self.queue.rng.random(), self.boot_host, number)
        self.later(4.0, self._end_starting_over)

    def _kill_host(self, number: int) -> None:
        self.stop_host(number, quietly=False)

    def _end_starting_over(self) -> None:
        self.starts_over = False

    def boot_host(self, number: int) -> None:
        """Start a host's process, unless it runs or the job is over."""
        host = self.hosts.get(number)
        if self.over is not None or (host is not None and not host.is_dead):
            return
        self.network.off.discard(number)
        self.hosts[number] = SimulatedHost(self, number)
        self.tell(f"host {number}", "starts")

    def stop_host(self, number: int, *, quietly: bool) -> None:
        """Kill a host's process, or switch its machine off."""
        host = self.hosts.get(number)
        if host is None or host.is_dead:
            return
        self.died_at[number] = self.queue.now
        host.stop(quietly=quietly)
        if quietly:
            self.network.off.add(number)

    def lose_memory(self, number: int) -> None:
        """Have a host forget its copies."""
        self.memories[number].clear()
        self.referee.on_lost(number)

    def freeze(self, actor: Actor, seconds: float) -> None:
        """Freeze an actor for a while."""
        if not actor.is_dead and not actor.is_frozen:
            actor.is_frozen = True
            self.later(seconds, actor.thaw)

    def start_worker(self, host: SimulatedHost, assigned: Assignment) -> SimulatedWorker:
        """Start a host's worker in a round."""
        training = self.trainings.get(assigned.name)
        if training is None:
            if len(self.trainings) > 20:
                self.trainings = dict([*self.trainings.items()][-10:])
            training = self.trainings[assigned.name] = Training(self, assigned)
        worker = SimulatedWorker(host, training, assigned.process)
        self.tell(f"host {host.number}", f"starts its worker in round {assigned.number}")
        training.add(worker)
        return worker

    def host_ends(self, host: SimulatedHost, over: Message | None, error: str) -> None:
        """Take the end of a host's process; its scheduler may start it again."""
        self.tell(f"host {host.number}", f"ends: {error or over}")
        self.died_at[host.number] = self.queue.now
        host.stop(quietly=False)
        if "refuses this host" in error:
            raise Violation("refused for good", f"host {host.number}: {error}")
        if self.over is None and error and (self.store is None or self.store.membership.over is None):
            self.later(10.0, self.boot_host, host.number)  # its scheduler starts it again
        if "Nothing of what" in error:  # the store may die before it has told all hosts, and a new one waits for them
            self.later(30.0, self._look_again, self.n_started_over)

    def _look_again(self, n_started_over: int) -> None:
        """Start the job again, as people do who see that hosts have ended with an error while others wait."""
        if self.over is None and self.n_started_over == n_started_over:
            self._start_over()

    def empty_disk(self) -> None:
        """Make room on the disk."""
        self.disk.is_full = max(0, self.disk.is_full - 1)

    def wake_disk(self) -> None:
        """Let the disk answer again."""
        self.disk.hangs = max(0, self.disk.hangs - 1)

    # Liveness.

    def _settle(self) -> None:
        """End all faults: from now on the job must recover, and end."""
        if self.is_calm:
            return
        self.is_calm = True
        self.tell("job", "the faults end")
        self.network.heal_all()
        self.network.latency_s = self.plan.latency_s
        self.disk.hangs = self.disk.is_full = 0
        self.slow.clear()
        for host in self.hosts.values():
            if host.worker is not None and host.worker.is_frozen:
                host.worker.thaw()
            if host.is_frozen:
                host.thaw()
        if self.store is not None and self.store.is_frozen:
            self.store.thaw()
        self.boot_store()
        for number in range(self.plan.n_hosts):
            self.later(5.0 * self.queue.rng.random(), self.boot_host, number)
        if self.over is None:
            self.later(CALM_S, self._check_trains, self.queue.now)

    def _check_trains(self, since: float) -> None:
        if self.over is not None:
            return
        if self.last_step_at < since:
            raise Violation("trains again", f"no step within {CALM_S:g} s of the last fault: {self._describe()}")
        self.later(CALM_S, self._check_over)

    def _check_over(self) -> None:
        if self.over is None:
            raise Violation("ends", f"the job does not end within {CALM_S:g} s: {self._describe()}")

    def _check_ended(self) -> None:
        alive = [number for number, host in self.hosts.items() if not host.is_dead]
        if alive:
            raise Violation("no host waits", f"the job is over, and hosts {alive} run on")

    def _describe(self) -> str:
        if self.store is None or self.store.is_dead:
            return "there is no store"
        membership = self.store.membership
        states = {member.host: member.state for member in membership.members.values()}
        return f"{membership.phase.value}, {states}, at least {self.plan.least} of {self.plan.n_hosts} hosts"
