"""One round of a job: from the launcher's environment to the fabric with the hole.

`initialize` joins this process to the others, finds out which hosts are there, and builds the fabric of their chips.
What is missing is the hole. Every process sees the same hosts, and raises the same error where they are inconsistent.
"""

from __future__ import annotations

import contextlib
import inspect
import ipaddress
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import jax
import numpy as np

from meshmend.errors import MeshError, QuarantineError, RestartError, TransientError
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.private import joined_as
from meshmend.jax.engine.tiles import TiledFabric, tile
from meshmend.jax.session.compile_cache import use_compile_cache, use_no_compile_cache
from meshmend.jax.session.coordination import Coordination, Facts, Question
from meshmend.jax.session.gloo import listen_where_reached
from meshmend.jax.session.survivors import (
    agree_on_quarantine,
    check_connected,
    check_part,
    fabric_without,
    find_fabric,
    processes_of,
    share_losses,
)
from meshmend.jax.train.plan import TrainingPlan
from meshmend.launch.addresses import family_of, is_loopback, join_address, split_address
from meshmend.launch.certificates import CREDENTIALS, check_coordinator, write_credentials
from meshmend.launch.environment import Launch, read_launch
from meshmend.launch.events import note_quarantined
from meshmend.launch.failure import await_stop, describe_failure, report_failure
from meshmend.launch.hosts import Hosts
from meshmend.launch.processes import wait_for_server
from meshmend.launch.timeline import Timeline, process_started_at
from meshmend.launch.warm import PRELOADED, jax_settings
from meshmend.planning import PlanCache
from meshmend.quarantine import Quarantined

RECOVERY_BUDGET_S = 2.0
"""CPU seconds for a plan that nobody prepared."""
GAVE_UP = 13
"""Exit status of a process that lost its peers or failed: a launcher restarts it, unless it is 0 or `FINAL`."""


class Cut(NamedTuple):
    """A tile's side, and the axes inside it, as `tile` takes them."""

    side: str
    inner: dict[str, int]

    def of(self, fabric: Fabric) -> TiledFabric:
        """Cut a fabric into these tiles."""
        return tile(fabric, self.side, **self.inner)


@dataclass(frozen=True)
class Session:
    """One process's part in one round of the job. Made by `initialize`; use it in a `with` block.

    Leaving the block by an exception ends the process at once. With a peer gone, an orderly shutdown would wait for it
    until some timeout, and the launcher can only restart what has ended.
    """

    fabric: Fabric
    launch: Launch
    """The launch, with processes numbered in the order of their hosts."""
    hosts: Hosts | None
    """The whole machine; None on TPU, where devices report their coordinates."""
    host_of_process: tuple[int, ...]
    """Number of each process's host; on TPU, where hosts have no number, that of the process."""
    coordination: Coordination
    timeline: Timeline
    cut: Cut | None = None
    """How the chips are cut into tiles, by `in_tiles`."""
    quarantined: tuple[Quarantined, ...] = ()
    """Suspects left out of the fabric though their host is there: the same on every process."""
    shape: Sequence[int] | str | None = None
    """The shape that `initialize` was given, if any."""

    @property
    def host(self) -> int:
        """Number of this process's host."""
        return self.host_of_process[self.launch.process]

    def in_tiles(self, side: str, **inner: int) -> Self:
        """Return this session with its chips cut into tiles, as by `mmj.tile(session.fabric, side, **inner)`.

        Every process makes the same tiles, of whichever chips are left, so after a restart they may lie elsewhere.
        A host without a chip of any tile has no part in the training, and is refused.
        """
        cut = Cut(side, inner)
        fabric = cut.of(self.fabric)
        used = {device.process_index for device in fabric.jax_mesh.devices.flat}
        idle = [host for process, host in enumerate(self.host_of_process) if process not in used]
        if idle:
            raise RestartError(
                f"Host {idle[0]} has no chip in any of the {fabric.mesh.n_chips} tiles of {side} chips that "
                f"{self.fabric.mesh!r} has room for. Start the job without it, or cut smaller tiles.",
                host=idle[0],
            )
        self.timeline.note("tiles", tiles=fabric.mesh.n_chips, chips=fabric.n_chips, wasted=fabric.tiling.n_wasted)
        return replace(self, fabric=fabric, cut=cut)

    def agree_on_plan(
        self, make: Callable[[PlanCache], TrainingPlan], cache: PlanCache | str | Path | None = None
    ) -> TrainingPlan:
        """Return what `make` plans, the same on every process: see `ask_and_plan`."""
        return self.ask_and_plan(Question(None, lambda _: None), make, cache)[1]

    def ask_and_plan(
        self,
        question: Question,
        make: Callable[[PlanCache], TrainingPlan],
        cache: PlanCache | str | Path | None = None,
    ) -> tuple[Any, TrainingPlan]:
        """Ask a question, and on the same occasion agree on a plan; return its answer and the plan, the same on all.

        Each process looks for the plan in its own cache, which may be on a disk that all share, or on its own. The plan
        of the first process that has one counts. Where none has it, process 0 plans once it has judged the question.
        The others wait for it as long as it is alive, and raise its error if it has none. Those that still lack the
        plan are sent it, and keep it in their caches. `make` must use the cache that it is given.
        """
        folder = (cache if isinstance(cache, PlanCache) else PlanCache(cache)).folder
        used, is_planned = PlanCache(folder, is_complete=True), False
        made: TrainingPlan | None = None

        def look() -> str:
            nonlocal made
            with contextlib.suppress(Exception):  # whatever is wrong, process 0 raises it for all when it plans
                made = make(used)
            return made.digest if made else ""

        def plan_here() -> str:
            nonlocal used, made, is_planned
            used, is_planned = PlanCache(folder), True
            made = make(used)
            return made.digest

        with self.timeline.timed("plan") as facts:
            judge = partial(judge_plan, judge=question.judge, make=plan_here)
            told = self.coordination.decide([question.fact, look()], judge)
            sender, digest = int(told["sender"]), str(told["digest"])
            if told["is_lacking"]:
                # Where the folder is on a disk that all share, what process 0 has made is there now.
                lacks = (made is None or made.digest != digest) and look() != digest
                content = self.coordination.send(sender, used.pack, wants=lacks)
                if content is not None:
                    with tempfile.TemporaryDirectory() as received:
                        PlanCache(received).unpack(content)
                        made = make(PlanCache(received))  # plans what the sender could not store
                    with contextlib.suppress(OSError):
                        PlanCache(folder).unpack(content)
                    facts["from_process"] = sender
            if made is None or made.digest != digest:
                raise RestartError(
                    f"Process {self.launch.process} came to another plan than process {sender}, so that their programs "
                    "would not fit. Give all of them the same script and versions, or empty the folder of plans."
                )
            facts["from_cache"] = not is_planned
            facts["planner"], facts["steps"] = made.schedules[0].planner, made.schedules[0].n_steps
        return told["answer"], made

    def fabrics_ahead(self, most: int | None = None, *, is_divided: bool = False) -> Iterator[tuple[int | str, Fabric]]:
        """Return what the fabric would be after each possible loss: (who is lost, the fabric).

        That is each single host, by its number, and then all hosts of a failure domain at once, by the domain's name.
        With `most`, only single hosts, and at most so many from the first to the last, evenly spread. Process 0 has all
        of them and the others none; or if `is_divided`, each has its share (`share_losses`).

        Devices are there only to compile for. They have the numbers that the survivors' will have, so that their
        programs go into the compile cache under the keys of the restarted job. Where hosts are given by their numbers,
        processes and their devices are numbered anew after a loss, so those of the first processes stand in for the
        survivors. Where devices report coordinates (TPU), the chips of each process are a hole in turn, and its number
        stands for the host. A TPU device's number is its place in the slice, which does not change with who is missing,
        so the survivors stand for themselves.

        Left out are losses that cut the mesh in two, that leave no tile whole, or nothing to train on.
        """
        if self.launch.process != 0 and not is_divided:
            return
        devices = jax.devices()
        chips = self.fabric.chips if isinstance(self.fabric, TiledFabric) else self.fabric
        here = processes_of(devices) if self.hosts is None else self.host_of_process
        losses: list[tuple[int | str, Collection[int]]] = [(host, [host]) for host in here]
        if most is not None:
            losses = [losses[i] for i in np.linspace(0, len(here) - 1, min(most, len(here))).astype(int)]
        else:
            of_domain: dict[str, set[int]] = {}
            for host, domain in zip(here, chips.domains, strict=False):
                of_domain.setdefault(domain, set()).add(host)
            losses += [(name, lost) for name, lost in of_domain.items() if name and 1 < len(lost) < len(here)]
        if is_divided:
            process_of = {host: process for process, host in enumerate(here)}
            taken = [[process_of[host] for host in lost] for _, lost in losses]
            shares = share_losses(taken, self.launch.n_processes, are_renumbered=self.hosts is not None)
            losses = [loss for loss, process in zip(losses, shares, strict=True) if process == self.launch.process]
        for name, lost in losses:
            try:
                fabric = fabric_without(lost, self.hosts, self.host_of_process, devices, self.shape, self.quarantined)
                if fabric is None or not fabric.mesh.is_connected:
                    continue
                # The restarted job plans for what was measured, too, and hosts stay in their failure domains. Where
                # hosts are given by their numbers, processes are numbered anew.
                stay = [domain for host, domain in zip(here, chips.domains, strict=False) if host not in lost]
                domains = chips.domains if self.hosts is None else tuple(stay)
                fabric = replace(fabric, hardware=chips.hardware, domains=domains)
                if self.cut is not None:
                    fabric = self.cut.of(fabric)
            except (MeshError, QuarantineError, RestartError):
                continue  # the restarted job would stop there, too
            if is_divided and self.launch.process not in {one.process_index for one in fabric.jax_mesh.devices.flat}:
                continue  # no tile has a chip of the host that this process stands for: the restarted job would stop
            yield name, fabric

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or is_orderly(error):
            jax.distributed.shutdown()
        else:
            self.give_up(error)

    def give_up(self, error: BaseException) -> NoReturn:
        """Record and print an error, and end the process at once, from any thread."""
        self.timeline.note("gave up", why=f"{type(error).__name__}: {error}"[:300])
        self.timeline.flush()
        failure = describe_failure(error)
        if not report_failure(error):  # without `meshmend run`, nobody else shows it
            sys.stderr.write(failure.trace or f"{failure.error}\n")
        elif failure.kind != "transient":
            await_stop()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(GAVE_UP)

    def stop(self, number: signal.Signals) -> NoReturn:
        """End the process as a signal would, in order: with all others, when each of them has come to this point."""
        self.coordination.wait_for_all()
        jax.distributed.shutdown()
        self.timeline.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + number)

    def end_with(self, error: BaseException) -> None:
        """End the job with an error, from a thread beside the one that trains, whose loop calls `check`."""
        self.give_up(error)

    def check(self) -> None:
        """Raise what a thread has ended the job with, where that has not ended the process."""


def judge_plan(
    everybody: list[tuple[Any, str]], *, judge: Callable[[Facts], Any], make: Callable[[], str]
) -> dict[str, Any]:
    """Judge what all have said of something else, then say whose plan counts, given the digest of each one's plan.

    Where nobody has a plan, `make` plans on process 0, and returns the digest.
    """
    answer, digests = judge([fact for fact, _ in everybody]), [digest for _, digest in everybody]
    if not any(digests):
        digests[0] = make()
    sender = next(process for process, digest in enumerate(digests) if digest)
    return {"answer": answer, "sender": sender, "digest": digests[sender], "is_lacking": len({*digests}) > 1}


def is_orderly(error: BaseException | None) -> bool:
    """Whether a `with` block that was left by an error, or by none, ends a job that is done."""
    return error is None or (isinstance(error, SystemExit) and not error.code)


def initialize(
    shape: Sequence[int] | str | None = None,
    host: Sequence[int] | str | None = None,
    *,
    host_index: int | str | Sequence[int] | None = None,
    launch: Launch | None = None,
    timeout_s: int = 30,
    compile_cache: str | Path | None = None,
    timeline: str | Path | None = None,
    quarantine: str | Path | None = None,
    preemption: bool = False,
) -> Session:
    """Join the job, find the survivors, and return the session. Call it first, before anything touches a device.

    `shape` is the whole machine and `host` the tile of chips that a host drives, as in "8x8" and "4x2". `host_index` is
    this host's number in row-major order, or the coordinate of its first chip. By default they come from the
    environment: MESHMEND_SHAPE (or MESHMEND_MACHINE, the file that describes it, as `meshmend run --machine` sets it),
    MESHMEND_HOST_SHAPE and MESHMEND_HOST. TPU devices report their coordinates, and none of the three is needed.
    `launch` describes the launch, by default as `meshmend run` has put it into the environment, or as
    jax.distributed.initialize() knows it, if that was called before. Then processes must be numbered in the order of
    their hosts.

    `timeout_s` is how long processes wait for each other at the start, and so what it costs if one dies before it has
    joined. Later, all end if JAX has not heard from one for 10 s, or for 100 s under `meshmend run`.

    `compile_cache` is a folder that all hosts share (JAX lets only process 0 write), where every compiled program is
    kept; by default JAX_COMPILATION_CACHE_DIR. On CPU devices there is none. `timeline` is a file for this host's
    events, by default MESHMEND_TIMELINE. `quarantine` is the folder with the job's quarantine list, by default
    MESHMEND_SHARED: what is listed there is left out of the fabric.

    With `preemption`, JAX's preemption service is on, as `Job` has it: SIGTERM does not end the process, and
    `jax.experimental.multihost_utils.reached_preemption_sync_point` says after which step to save and end.
    """
    started, joining = process_started_at(), time.time()
    launched = _find_launch() if launch is None else launch
    notes = Timeline(timeline or os.environ.get("MESHMEND_TIMELINE"), job=launched.job, round=launched.round)
    if launched.hosts:
        notes.facts["host"] = launched.hosts[launched.process]
    _configure(compile_cache, preemption=preemption)
    hosts, numbers = None, tuple(range(launched.n_processes))
    try:
        if launched.coordinator:
            files, listening = _credentials(launched), listening_address(launched.coordinator)
            if launched.process == 0:
                _check_free(listening)
            else:
                wait_for_server(launched.coordinator, timeout_s)
                if files:
                    check_coordinator(launched.coordinator, files, timeout_s)
            jax.distributed.initialize(
                launched.coordinator,
                launched.n_processes,
                launched.process,
                coordinator_bind_address=listening,
                # The store of `meshmend run` finds hosts that freeze, and a busy process must not be taken for dead.
                heartbeat_timeout_seconds=100 if launched.hosts else 10,
                initialization_timeout=timeout_s,
                shutdown_timeout_seconds=timeout_s,
                cluster_detection_method="deactivate",
                **files,
            )
        if _platform() in ("", "cpu"):
            listen_where_reached(launched)
        joined = time.time()
        coordination = Coordination(launched.process, launched.n_processes)
        if not _knows_coordinates(host_index):
            hosts, numbers = _find_hosts(shape, host, host_index, launched, coordination)
        notes.facts |= {"process": launched.process, "host": numbers[launched.process]}
        quarantined, domains = agree_on_quarantine(quarantine, coordination, hosts)
        fabric = replace(find_fabric(shape, hosts, numbers, quarantined), domains=domains)
        if fabric.platform == "cpu":
            use_no_compile_cache()
        check_part(fabric, numbers, len(quarantined))
        check_connected(fabric, numbers)
    except (RestartError, QuarantineError) as error:
        notes.note("gave up", why=str(error))
        raise
    notes.note("process", at=started, seconds=joining - started)
    notes.note("join", at=joining, seconds=joined - joining)
    found = {
        "chips": fabric.mesh.n_chips,
        "hosts": sorted(numbers),
        **({} if hosts is None else {"machine": str(hosts)}),
    }
    notes.note("fabric", at=joined, seconds=time.time() - joined, **found)
    for entry in quarantined:
        note_quarantined(notes, entry, hosts)
    return Session(fabric, launched, hosts, numbers, coordination, notes, quarantined=quarantined, shape=shape)


def _credentials(launched: Launch) -> dict[str, Any]:
    """Return what JAX needs so that only processes with the job's secret can join; nothing where it cannot have that.

    Then anybody who reaches the coordinator can end the job with one call, which process 0 says at the first start.
    """
    given = os.environ.pop(CREDENTIALS, "")  # nor do processes that the script starts need it
    has_tls = "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters
    if given and has_tls:
        return write_credentials(given)
    address = split_address(launched.coordinator)[0]
    is_first = launched.process == 0 and launched.round == 1 and launched.hosts and launched.n_processes > 1
    if is_first and not is_loopback(address):
        needed = [] if has_tls else [f"JAX 0.12 or later (this is {jax.__version__})"]
        needed += [] if given else ["a secret and the package `cryptography` on all hosts"]
        told = f"JAX's coordinator at {address} is open to whoever reaches this network: one call can end the job."
        sys.stderr.write(f"{told} To close it: {' and '.join(needed)}.\n")
    return {}


def listening_address(coordinator: str) -> str | None:
    """Return where JAX's coordinator is to listen: at the address that the hosts use, if it is one of this machine's.

    Otherwise, as where hosts use a name, None: JAX then listens at all addresses of the machine.

    >>> listening_address("127.0.0.1:5000"), listening_address("a-name:5000")
    ('127.0.0.1:5000', None)
    """
    try:
        _bind(join_address(split_address(coordinator)[0], 0))
    except (OSError, ValueError):
        return None
    return coordinator


def _bind(address: str) -> None:
    """Bind a socket to an address and port for a moment; port 0 stands for any that is free."""
    host, port = split_address(address)
    ipaddress.ip_address(host)  # of a name, nobody knows what the others take it for
    with socket.socket(family_of(host)) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((host, port))


def _check_free(address: str | None) -> None:
    """Raise if somebody else listens where the coordinator is to: JAX would end this process without a word on it."""
    if address is None:
        return
    try:
        _bind(address)
    except OSError as error:
        raise TransientError(
            f"Another process listens at {address}, where this job's coordinator is to be ({error.strerror}): a "
            "stranger, or one that has taken the port by chance. The next round takes another port."
        ) from error


def _configure(compile_cache: str | Path | None, *, preemption: bool) -> None:
    check_preloaded()
    use_compile_cache(compile_cache)
    if _platform() in ("", "cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", preemption)


def check_preloaded() -> None:
    """Raise if the script has changed a setting of JAX after `meshmend run` had imported JAX."""
    loaded = os.environ.get(PRELOADED)
    before = json.loads(loaded) if loaded is not None else jax_settings()
    changed = sorted(name for name, value in jax_settings().items() if before.get(name) != value)
    if changed:
        raise RestartError(
            f"The script sets {changed[0]}, but `meshmend run` had imported JAX before, so it has no effect. Set it in "
            "the environment of `meshmend run`, use jax.config.update, or give `meshmend run` the option --cold."
        )


def _platform() -> str:
    """Return the platform that JAX is configured to use, "" if none is."""
    platforms: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    return (platforms or "").split(",")[0]


def _knows_coordinates(host_index: Any) -> bool:
    """Whether devices report coordinates, decided without touching them: only a TPU's do, unless the host is given."""
    placed = host_index is not None or "MESHMEND_HOST" in os.environ
    return _platform() == "tpu" or (_platform() == "" and not placed)


def _find_launch() -> Launch:
    joined = None if "MESHMEND_ROUND" in os.environ else joined_as()
    if joined is None:
        return read_launch()
    return Launch("", joined[1], joined[0], launcher="jax.distributed", job=os.environ.get("MESHMEND_JOB", "job"))


def _find_hosts(
    shape: Sequence[int] | str | None,
    host: Sequence[int] | str | None,
    host_index: int | str | Sequence[int] | None,
    launch: Launch,
    coordination: Coordination,
) -> tuple[Hosts, tuple[int, ...]]:
    """Return the machine, and the host of each process, where devices do not report coordinates."""
    wraps = {"machine": os.environ.get("MESHMEND_MACHINE"), "wrap": os.environ.get("MESHMEND_WRAP")}
    shape = shape if shape is not None else os.environ.get("MESHMEND_SHAPE")
    host = host if host is not None else os.environ.get("MESHMEND_HOST_SHAPE")
    host_index = host_index if host_index is not None else os.environ.get("MESHMEND_HOST")
    is_described = host is not None and (shape is not None or wraps["machine"] is not None)
    if launch.hosts:
        # The launcher knows all hosts already, and has checked that they describe the same machine.
        if host is None or not is_described:
            raise RestartError(
                "The devices here report no coordinates, so the machine must be described: give `meshmend run` "
                "--shape 8x8 and --host 4x2, or initialize() shape and host."
            )
        hosts = Hosts.described(shape, host, **wraps)
        return hosts, tuple(hosts.number(number) for number in launch.hosts)
    # Errors are exchanged before anyone raises, or the others would wait for this process.
    mine: dict[str, Any] = {}
    if host is None or not is_described or host_index is None:
        mine["error"] = (
            f"Process {launch.process} has no chips assigned. Give initialize() shape, host and host_index, or set "
            "MESHMEND_SHAPE=8x8, MESHMEND_HOST_SHAPE=4x2 and MESHMEND_HOST=3 (this host's number)."
        )
    else:
        try:
            hosts = Hosts.described(shape, host, **wraps)
            mine |= {"machine": str(hosts), "host": hosts.number(host_index)}
        except (MeshError, RestartError) as error:
            mine["error"] = f"Process {launch.process}: {error}"[:2000]
    return hosts, tuple(coordination.decide(mine, check_hosts))


def check_hosts(everybody: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Return each process's host, or raise what is wrong with them."""
    errors = [fact["error"] for fact in everybody if "error" in fact]
    if errors:
        raise RestartError(errors[0])
    machines = sorted({fact["machine"] for fact in everybody})
    if len(machines) > 1:
        raise RestartError(
            f"Processes describe different machines: {'; '.join(machines)}. Give all of them the same shapes."
        )
    numbers = [int(fact["host"]) for fact in everybody]
    for number, times in Counter(numbers).items():
        if times > 1:
            twice = [str(process) for process, other in enumerate(numbers) if other == number]
            raise RestartError(
                f"Processes {' and '.join(twice)} both say that they are host {number}. Give each host its own "
                "MESHMEND_HOST.",
                host=number,
            )
    if numbers != sorted(numbers):
        raise RestartError(
            f"Processes 0, 1, … are on hosts {', '.join(map(str, numbers[:20]))}. Number them in the order of their "
            "hosts, so that after a loss the programs of the same hole are found again."
        )
    return tuple(numbers)
