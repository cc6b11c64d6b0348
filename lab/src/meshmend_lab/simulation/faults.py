"""What each fault does to a simulated job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshmend_lab.simulation.network import TO_HOST, TO_STORE
from meshmend_lab.simulation.plan import Fault

if TYPE_CHECKING:
    from meshmend_lab.simulation.host import SimulatedHost
    from meshmend_lab.simulation.job import SimulatedJob
    from meshmend_lab.simulation.training import SimulatedWorker

BOTH = (TO_STORE, TO_HOST)
FORGOTTEN_S = 45.0
"""How long a host may not notice that its connection leads nowhere."""


def inject(job: SimulatedJob, fault: Fault) -> None:
    """Let a fault happen, if what it is about is there."""
    if job.is_calm:
        return
    if EFFECTS[fault.kind](job, fault):
        job.n_faults[fault.kind] += 1
        job.tell("FAULT", str(fault))


def _hosts(job: SimulatedJob, fault: Fault) -> list[SimulatedHost]:
    return [host for number in fault.hosts if (host := job.hosts.get(number)) is not None and not host.is_dead]


def _worker(job: SimulatedJob, fault: Fault) -> SimulatedWorker | None:
    for host in _hosts(job, fault):
        if host.worker is not None and host.worker.code is None and not host.is_frozen:
            return host.worker
    return None


def _stop(job: SimulatedJob, fault: Fault, *, quietly: bool, keeps_memory: bool) -> bool:
    hosts = _hosts(job, fault)
    for at, host in enumerate(hosts):
        job.stop_host(host.number, quietly=quietly)
        if not keeps_memory:
            job.lose_memory(host.number)
        # Some come back one by one.
        job.later(fault.seconds * (1 + at * (fault.chance < 0.3)), job.boot_host, host.number)
    return bool(hosts)


def _kill(job: SimulatedJob, fault: Fault) -> bool:
    return _stop(job, fault, quietly=False, keeps_memory=True)


def _switch_off(job: SimulatedJob, fault: Fault) -> bool:
    return _stop(job, fault, quietly=True, keeps_memory=False)


def _restart_empty(job: SimulatedJob, fault: Fault) -> bool:
    return _stop(job, fault, quietly=False, keeps_memory=False)


def _two(job: SimulatedJob, fault: Fault) -> bool:
    return _stop(job, fault, quietly=fault.chance < 0.5, keeps_memory=fault.chance > 0.7)


def _domain(job: SimulatedJob, fault: Fault) -> bool:
    names = job.plan.domains
    if not names:
        return False
    together = tuple(host for host, name in enumerate(names) if name == names[fault.hosts[0]])
    return _switch_off(job, Fault(fault.at, fault.kind, together, fault.seconds, fault.chance))


def _freeze_host(job: SimulatedJob, fault: Fault) -> bool:
    worker = _worker(job, fault)
    if worker is not None:
        job.freeze(worker, fault.seconds)
    return _freeze_agent(job, fault)


def _freeze_agent(job: SimulatedJob, fault: Fault) -> bool:
    hosts = _hosts(job, fault)
    for host in hosts:
        job.trouble(host.number, fault.seconds)
        job.freeze(host, fault.seconds)
    return bool(hosts)


def _freeze_worker(job: SimulatedJob, fault: Fault) -> bool:
    worker = _worker(job, fault)
    if worker is None:
        return False
    _excuse_after_the_last_step(job, worker)
    job.freeze(worker, fault.seconds)
    worker.host.look_soon()
    return True


def _excuse_after_the_last_step(job: SimulatedJob, worker: SimulatedWorker) -> None:
    """Allow the job to end with the failure of this worker, where others have finished, or will."""
    if worker.training.is_finishing:
        job.excuses.add("a worker failed after the last step")


def _cut(job: SimulatedJob, fault: Fault) -> bool:
    return _cut_ways(job, fault, BOTH)


def _cut_one_way(job: SimulatedJob, fault: Fault) -> bool:
    return _cut_ways(job, fault, BOTH[fault.chance < 0.5 :][:1])


def _cut_ways(job: SimulatedJob, fault: Fault, ways: tuple[int, ...]) -> bool:
    for number in fault.hosts:
        job.trouble(number, fault.seconds)
        job.network.cut(number, ways, fault.seconds)
        if (fault.chance * 7) % 1 < 0.5:  # also from the other hosts
            job.network.apart[number] += 1
            job.later(fault.seconds, job.network.rejoin, number)
    return True


def _reset(job: SimulatedJob, fault: Fault) -> bool:
    for number in fault.hosts:
        for wire in list(job.network.wires):
            if wire.number == number:
                job.trouble(number, 5.0)
                if fault.chance < 0.5:
                    wire.reset()
                else:  # the store hears of it late, when there may be another connection
                    job.later(fault.seconds / 5, wire.reset)
    return True


def _forget(job: SimulatedJob, fault: Fault) -> bool:
    for number in fault.hosts:
        job.trouble(number, FORGOTTEN_S)
        for wire in job.network.wires:
            if wire.number == number:
                wire.is_lost = True
    return True


def _late(job: SimulatedJob, fault: Fault) -> bool:
    factor = 1 + 5 * fault.chance
    job.network.latency_s *= factor
    job.later(fault.seconds, job.network.speed_up, factor)
    return True


def _kill_store(job: SimulatedJob, fault: Fault) -> bool:
    return job.stop_store(fault.seconds, quietly=False)


def _switch_off_store(job: SimulatedJob, fault: Fault) -> bool:
    return job.stop_store(fault.seconds, quietly=True)


def _move_store(job: SimulatedJob, fault: Fault) -> bool:
    job.rounds_noted = 0  # its folder stays behind
    return job.stop_store(fault.seconds, quietly=fault.chance < 0.5)


def _pause_store(job: SimulatedJob, fault: Fault) -> bool:
    if job.store is None or job.store.is_dead or job.store.is_frozen:
        return False
    job.freeze(job.store, fault.seconds)
    return True


def _suspend_store(job: SimulatedJob, fault: Fault) -> bool:
    """Its machine: nothing reaches its kernel, either, and is sent again only some time after it is back."""
    if not _pause_store(job, fault):
        return False
    for number in range(job.plan.n_hosts):
        job.network.cut(number, (TO_STORE,), fault.seconds + 1.5 * job.queue.rng.random())
    return True


def _fill_disk(job: SimulatedJob, fault: Fault) -> bool:
    job.disk.is_full += 1
    job.later(fault.seconds, job.empty_disk)
    return bool(job.plan.disk_every)


def _hang_disk(job: SimulatedJob, fault: Fault) -> bool:
    job.disk.hangs += 1
    job.later(fault.seconds, job.wake_disk)
    return bool(job.plan.disk_every)


def _lose_write(job: SimulatedJob, fault: Fault) -> bool:
    if not job.disk.checkpoints:
        return False
    step = max(job.disk.checkpoints)
    if fault.chance < 0.5:
        job.disk.checkpoints[step].is_damaged = True
    else:
        del job.disk.checkpoints[step]
    job.referee.on_storage_fault()
    return True


def _damage(job: SimulatedJob, fault: Fault) -> bool:
    copies = sorted(job.memories[fault.hosts[0]].items())
    if not copies:
        return False
    _, copy = copies[int(fault.chance * len(copies))]
    copy.damaged.add(sorted(copy.parts)[int(fault.chance * 997) % len(copy.parts)])
    job.referee.on_lost(fault.hosts[0])
    return True


def _jump(job: SimulatedJob, fault: Fault) -> bool:
    job.clocks[fault.hosts[0]] += fault.seconds
    for host in _hosts(job, fault):
        host.clock_s += fault.seconds
    return True


def _jump_store(job: SimulatedJob, fault: Fault) -> bool:
    if job.store is None or job.store.is_dead:
        return False
    job.store.clock_s += fault.seconds
    return True


def _fail_worker(job: SimulatedJob, fault: Fault) -> bool:
    worker = _worker(job, fault)
    if worker is None:
        return False
    _excuse_after_the_last_step(job, worker)
    worker.end((1, -11, 137)[int(fault.chance * 3)])
    return True


def _raise_one(job: SimulatedJob, fault: Fault) -> bool:
    worker = _worker(job, fault)
    if worker is None:
        return False
    _excuse_after_the_last_step(job, worker)
    # Never the same line twice: a restart that repeats an error ends the job.
    worker.fail("lasting", f"ValueError: boom {fault.at:.3f}")
    workers = [*worker.training.workers.values()]
    if all(one.failure is not None and one.failure.kind == "lasting" for one in workers):
        job.excuses.add("the script raised on all hosts, by one fault each")
    return True


def _raise_all(job: SimulatedJob, _: Fault) -> bool:
    job.excuses.add("the script raised on every host")
    for host in list(job.hosts.values()):
        if not host.is_dead and host.worker is not None and host.worker.code is None:
            host.worker.after(1.5 * job.queue.rng.random(), host.worker.fail, "lasting", "ValueError: boom everywhere")
    return True


def _raise_final(job: SimulatedJob, fault: Fault) -> bool:
    worker = _worker(job, fault)
    if worker is None:
        return False
    job.excuses.add("the script asked for what cannot be")
    worker.fail("final", "ParameterError: steps is -1")
    return True


def _leave(job: SimulatedJob, fault: Fault) -> bool:
    hosts = _hosts(job, fault)
    for host in hosts:
        job.trouble(host.number, 30.0)
        host.leave()
    return bool(hosts)


def _slow(job: SimulatedJob, fault: Fault) -> bool:
    job.slow[fault.hosts[0]] = 1 + 9 * fault.chance
    job.later(fault.seconds, job.slow.pop, fault.hosts[0], None)
    return True


def _wrong_numbers(job: SimulatedJob, fault: Fault) -> bool:
    worker = _worker(job, fault)
    if worker is None or not worker.training.is_training:
        return False
    training = worker.training
    job.observations.append([training.attempt, max(0, training.verified)])
    for each in training.workers.values():
        each.fail("transient", "QuarantineError: wrong numbers")
    return True


def _halves(job: SimulatedJob, fault: Fault) -> bool:
    """One half is switched off and on again while the other, which trains alone, is cut off from a store that moves."""
    half = job.plan.n_hosts // 2
    for number in range(half):
        job.stop_host(number, quietly=fault.chance < 0.5)
        job.later(12 + fault.seconds / 4, job.boot_host, number)
    for number in range(half, job.plan.n_hosts):
        job.trouble(number, 22 + fault.seconds)
        job.later(12.0, job.network.cut, number, BOTH, 10 + fault.seconds)
    if fault.chance < 0.7:
        job.later(13.0, job.stop_store, 1.0)
    return True


def in_last_moments(job: SimulatedJob, worker: SimulatedWorker) -> None:
    """Let something happen to a host whose worker has done the last step: it is lost, or its worker fails."""
    chance, number = job.queue.rng.random(), worker.host.number
    if worker.host.is_dead or worker.code is not None:
        return
    job.n_faults["in its last moments"] += 1
    job.tell("FAULT", f"host {number} in its last moments")
    if chance < 0.5:
        job.stop_host(number, quietly=chance < 0.25)
        job.later(40.0 * chance, job.boot_host, number)
    else:
        job.excuses.add("a worker failed in its last moments")
        worker.end(1)


EFFECTS: dict[str, Callable[[SimulatedJob, Fault], bool]] = {
    "host killed": _kill,
    "host switched off": _switch_off,
    "host restarted without its memory": _restart_empty,
    "two hosts at once": _two,
    "domain switched off": _domain,
    "host frozen": _freeze_host,
    "agent frozen": _freeze_agent,
    "worker frozen": _freeze_worker,
    "host cut off": _cut,
    "host cut off one way": _cut_one_way,
    "hosts cut off": _cut,
    "connection reset": _reset,
    "connection forgotten": _forget,
    "messages late": _late,
    "store killed": _kill_store,
    "store switched off": _switch_off_store,
    "store moved": _move_store,
    "store paused": _pause_store,
    "store suspended": _suspend_store,
    "disk full": _fill_disk,
    "disk hangs": _hang_disk,
    "disk loses its last write": _lose_write,
    "copy damaged": _damage,
    "clock jumps": _jump,
    "store's clock jumps": _jump_store,
    "worker fails": _fail_worker,
    "script raises on one host": _raise_one,
    "script raises on every host": _raise_all,
    "script asks for what cannot be": _raise_final,
    "host asked to leave": _leave,
    "host slow": _slow,
    "wrong numbers": _wrong_numbers,
    "halves apart": _halves,
}
