"""`meshmend run`: a training script on this host of a job, or on all virtual hosts of a job on this machine."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from meshmend.buckets import Folder, refuse_bucket, writable_path
from meshmend.cli.common import TERMINATED
from meshmend.cli.options import MetricsOption, option
from meshmend.cli.screen import Screen
from meshmend.cli.store import JobOption, SecretOption, check_metrics, serving
from meshmend.cost.units import parse_seconds
from meshmend.errors import LaunchError
from meshmend.extras import require
from meshmend.files import locked
from meshmend.launch.agent import SAVE_S, name_code
from meshmend.launch.environment import (
    DOMAIN,
    SHARED,
    find_domain,
    find_host_index,
    find_hosts,
    find_job,
    find_secret,
    find_store,
    memory_for_events,
)
from meshmend.launch.goodput import rounds_of
from meshmend.launch.host import HostDescription
from meshmend.launch.hosts import Hosts, name_hosts
from meshmend.launch.job import HostProcesses
from meshmend.launch.local import LocalJob, worker_environment
from meshmend.launch.member import OVER
from meshmend.launch.timeline import timeline_of
from meshmend.launch.watching import Watch

WATCH_S = 0.1
STATE_WAIT = "30min"
"""How long survivors wait for hosts that have missing parts of the state: a reboot, or a cable that is plugged in."""

DomainOption = Annotated[
    str | None,
    option(
        "--domain",
        "NAME",
        "The failure domain, such as its rack: copies are kept elsewhere. With --local, a name per "
        "host, as in a,a,b,b.",
        show_default="MESHMEND_DOMAIN, or Slurm's topology",
    ),
]
StartOverOption = Annotated[
    bool, option("--start-over", "", "Begin at step 0, whatever the job has kept before this run.")
]
StateWaitOption = Annotated[
    str | None,
    option(
        "--state-wait",
        "TIME",
        "How long to wait for absent hosts that have missing parts of the state.",
        show_default="30min; with --local: 0s",
    ),
]
MachineFileOption = Annotated[
    Path | None,
    option(
        "--machine",
        "FILE",
        "In place of --shape and --wrap, a description: what has failed, slow cables, the hardware.",
    ),
]


def command(
    ctx: typer.Context,
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]", help="The script and its arguments; or -m MODULE.")
    ],
    local: Annotated[str | None, option("--local", "SHAPE", "A whole job here: a mesh of virtual chips.")] = None,
    shape: Annotated[str | None, option("--shape", "SHAPE", "The whole machine's mesh.")] = None,
    host: Annotated[str | None, option("--host", "HxW", "Chips that one host drives.")] = None,
    wrap: Annotated[
        str | None,
        option(
            "--wrap",
            "AXES",
            "Axes that wrap (torus): none, all, or numbers as in 0,1.",
            show_default="MESHMEND_WRAP, or none",
        ),
    ] = None,
    described: MachineFileOption = None,
    hosts: Annotated[
        str | None, option("--hosts", "MIN:MAX", "How many hosts to start with, and how many there are.")
    ] = None,
    store: Annotated[str | None, option("--store", "ADDR:PORT", "Where `meshmend store` listens.")] = None,
    shared: Annotated[
        str | None,
        option(
            "--shared", "DIR|URL", "A folder of all hosts, or gs://bucket/job.", show_default="with --local: shared"
        ),
    ] = None,
    job: JobOption = None,
    secret_file: SecretOption = None,
    host_index: Annotated[
        str | None, option("--host-index", "N|r,c", "Which host this is.", show_default="Slurm's, JobSet's")
    ] = None,
    address: Annotated[str | None, option("--address", "ADDR", "Under which other hosts reach this one.")] = None,
    domain: DomainOption = None,
    kill: Annotated[
        list[str] | None, option("--kill", "HOST@STEP", "With --local: kill a host after a step. Repeatable.")
    ] = None,
    restarts: Annotated[
        int, option("--restarts", "N", "Maximum consecutive failures of the script without a completed step.", min=0)
    ] = 3,
    start_over: StartOverOption = False,
    state_wait: StateWaitOption = None,
    cold: Annotated[
        bool, option("--cold", "", "Start each worker as a new Python, without JAX imported beforehand.")
    ] = False,
    metrics: MetricsOption = None,
) -> None:
    """Run a training script that survives failures of hosts.

    On a cluster, the same command on every host, and one `meshmend store`. When a host is lost, the others start the
    script again at once, on the chips that are left; when it comes back, with it. With --local, everything on this
    machine: virtual hosts, each a process with virtual CPU devices, the store, and a host that --kill kills for you.

    Example: meshmend run --local 4x8 --host 4x2 --kill 1@20 train.py
    """
    if script[0].startswith("-") and script[0] != "-m":
        # Options of the script are not known here, so the parser lets all pass; before the script it must not.
        ctx.ignore_unknown_options = False
        ctx.command.make_parser(ctx).parse_args(list(script))
    if described is not None and wrap is not None:
        raise LaunchError(f"{described} already says which axes wrap: leave out --wrap {wrap}.")
    folder = None if shared is None else writable_path(shared)
    asked = _Asked(
        argv=check_script(script),
        shared=folder,
        shape=local or shape,
        host=host,
        machine=None if described is None else described.absolute(),
        wrap=wrap or os.environ.get("MESHMEND_WRAP"),
        hosts=hosts,
        max_restarts=restarts,
        warm=not cold,
        domain=domain,
        start_over=start_over,
        state_wait_s=parse_seconds(state_wait or (STATE_WAIT if local is None else "0s")),
    )
    metrics = check_metrics(metrics, folder)
    if local is not None:
        refuse_bucket(folder, "with --local, give --shared DIR, and for checkpoints in a bucket Job(disk=…)")
        if store or host_index or shape:
            raise LaunchError(
                "--local brings its own store, hosts and shape: leave out --store, --host-index, --shape."
            )
        run = _local_job(asked, kill or (), find_secret(secret_file))
    else:
        if kill:
            raise LaunchError("--kill is for jobs on this machine: give --local, or kill a host by hand.")
        run = _host_of_cluster(asked, host_index, store, job, secret_file, address)
    require("jax", "orbax", needed_for="`meshmend run`", extra="launch")
    # Schedulers end a job by SIGTERM: it leaves in order then, as after Ctrl-C.
    signal.signal(signal.SIGTERM, _on_sigterm)
    with serving(metrics, folder):
        run()


@dataclass(frozen=True)
class _Asked:
    """What jobs on this machine and on a cluster are both given."""

    argv: list[str]
    shared: Folder | None
    shape: str | None
    host: str | None
    machine: Path | None
    wrap: str | None
    hosts: str | None
    max_restarts: int
    warm: bool
    domain: str | None
    start_over: bool
    state_wait_s: float

    def cut(self, host: str) -> Hosts:
        """Return the hosts of the machine, each with so many chips."""
        return Hosts.described(self.shape, host, machine=self.machine, wrap=self.wrap)


def _local_job(asked: _Asked, kill: Iterable[str], secret: str) -> Callable[[], None]:
    """Return what runs a whole job on this machine."""
    machine = asked.cut(asked.host or str(asked.shape))
    kills = [parse_kill(text, len(machine)) for text in kill]
    least, most = find_hosts(asked.hosts, len(machine))
    check_kills(kills, machine, least)
    if most != len(machine):
        raise LaunchError(f"--hosts is {asked.hosts!r}, but --local {asked.shape} makes {len(machine)} hosts.")
    domains = (asked.domain or "").split(",") if asked.domain else [""] * len(machine)
    if len(domains) != len(machine):
        raise LaunchError(
            f"--domain is {asked.domain!r}, expected a name for each of the {len(machine)} hosts, as in a,a,b,b. Leave "
            "a name empty where a host has none."
        )
    return partial(_run_locally, asked, machine, least, kills, secret, domains)


def _host_of_cluster(
    asked: _Asked,
    host_index: str | None,
    store: str | None,
    job: str | None,
    secret_file: Path | None,
    address: str | None,
) -> Callable[[], None]:
    """Return what runs this host of a job."""
    host, described, shared = asked.host, asked.machine is not None, asked.shared
    # With a description alone, devices report where they are, as a TPU's do.
    if (host is None and asked.shape is not None) or (host is not None and asked.shape is None and not described):
        raise LaunchError("--shape and --host belong together: the machine's mesh, and the chips of one host.")
    machine = None if host is None else asked.cut(host)
    here = find_host_index(host_index)
    number = _number(here) if machine is None else machine.number(here)
    what = HostDescription(
        argv=asked.argv,
        store=find_store(store),
        host=number,
        hosts=find_hosts(asked.hosts, None if machine is None else len(machine)),
        job=find_job(job),
        machine="" if machine is None else str(machine),
        environment=worker_environment(machine, number, shared, asked.machine) | {DOMAIN: find_domain(asked.domain)},
        address=address or "",
        max_restarts=asked.max_restarts,
        warm=asked.warm,
        start_over=asked.start_over,
        state_wait_s=asked.state_wait_s,
    )
    return partial(_run_here, what, find_secret(secret_file))


def check_script(words: list[str]) -> list[str]:
    """Return a script and its arguments, if the script is there."""
    if words[0] == "-m":
        if len(words) < 2:
            raise LaunchError("-m needs a module, as in: meshmend run --local 4x4 --host 2x2 -m package.train.")
    elif not Path(words[0]).is_file():
        raise LaunchError(
            f"There is no script {words[0]!r}. Options of `meshmend run` come before it, its own after it."
        )
    return words


@dataclass(frozen=True)
class Kill:
    """A host to kill when it has done a step."""

    host: int
    step: int


def parse_kill(text: str, n_hosts: int) -> Kill:
    """Read a host and a step, as in 1@20.

    >>> parse_kill("1@20", 4)
    Kill(host=1, step=20)
    """
    found = re.fullmatch(r"(\d+)@(\d+)", text)
    if found is None:
        raise LaunchError(f"--kill is {text!r}, expected a host and a step, as in 1@20.")
    host, step = int(found[1]), int(found[2])
    if host >= n_hosts:
        raise LaunchError(f"--kill {text}: there is no host {host}, the job has hosts 0 to {n_hosts - 1}.")
    return Kill(host, step)


def check_kills(kills: Sequence[Kill], machine: Hosts, least: int) -> None:
    """Raise `LaunchError` if the job could not go on after a kill: too few of the hosts left are joined by cables."""
    left = set(range(len(machine)))
    for kill in sorted(kills, key=lambda one: one.step):
        left.discard(kill.host)
        together = machine.largest_group(left) if left else ()
        if len(together) < least:
            apart = f", and cut apart: no more than {len(together)} of them are joined" * (len(together) < len(left))
            raise LaunchError(
                f"--kill {kill.host}@{kill.step} leaves {name_hosts(left) if left else 'no host'}{apart}. A "
                f"round needs {least}, so the job would wait for ever: kill another host, give a wider machine, or "
                f"allow fewer hosts, as in --hosts {max(1, len(together))}:{len(machine)}."
            )


def _number(host_index: str) -> int:
    if not host_index.isdecimal():
        raise LaunchError(
            f"--host-index is {host_index!r}: without --shape and --host, a host is given by its number, as in 5."
        )
    return int(host_index)


def _run_here(what: HostDescription, secret: str) -> None:
    screen, began = Screen(what.hosts[1]), time.time()
    with (
        memory_for_events(what.job) as folder,
        _telling_of_interrupts(screen, job := Watch(folder), began),
        HostProcesses(secret=secret, on_line=screen.line, on_event=screen.event) as processes,
        _announcing_interrupts(screen),
    ):
        processes.start_host(replace(what, timeline=str(timeline_of(folder, what.host))))
        while processes.running:
            processes.watch(1.0)
            job.read()
            screen.look(job, began)
        status = processes.statuses[what.host]
    screen.flush()
    if status:
        raise LaunchError(_why(screen, {what.host: status}))
    screen.tell_raised()
    screen.say(f"host {what.host} is done: {screen.over['why'] if screen.over else 'the job is over'}")


def _why(screen: Screen, statuses: dict[int, int]) -> str:
    # What a host says of itself tells more than that it has heard that the job is over.
    own = [error for error in screen.errors if not error.startswith(OVER)]
    if screen.errors:
        error = (own or screen.errors)[0].removeprefix(OVER)
        return error[:1].upper() + error[1:]
    host, status = next((host, status) for host, status in statuses.items() if status)
    return f"Host {host} ended with {name_code(status)}; what it wrote is above."


class Interrupted(KeyboardInterrupt):
    """Somebody has sent SIGTERM: it ends the job as Ctrl-C does, with an exit code of its own."""


def _on_sigterm(*_: object) -> None:
    raise Interrupted


@contextmanager
def _telling_of_interrupts(screen: Screen, job: Watch, began: float) -> Iterator[None]:
    """Say after Ctrl-C, or SIGTERM, what is stopped, and what the same command would go on from."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        job.read()
        saved = max((one.saved for one in job.newest), default=0)
        done = max((one.last for one in job.newest if one.started > began), default=0)
        kept = f"step {saved} is saved: the same command goes on from there" if saved else "no checkpoint is there yet"
        lost = f"; steps up to {done} were not saved" * (done > saved)
        screen.say(f"interrupted: all hosts are stopped; {kept}{lost}", "bold yellow")
        if isinstance(interrupt, Interrupted):
            raise typer.Exit(TERMINATED) from None
        raise


@contextmanager
def _announcing_interrupts(screen: Screen) -> Iterator[None]:
    """Say at Ctrl-C, or SIGTERM, what the hosts do before they end."""
    try:
        yield
    except KeyboardInterrupt:
        screen.say(
            f"interrupted: the hosts finish their step and save it, for at most {SAVE_S:.0f} s; Ctrl-C again ends them "
            "at once",
            "bold yellow",
        )
        screen.is_ending = True
        raise


def _run_locally(
    asked: _Asked, machine: Hosts, least: int, kills: list[Kill], secret: str, domains: Sequence[str]
) -> None:
    screen, began = Screen(len(machine)), time.time()
    folder = asked.shared or Path(SHARED).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / "run", timeout_s=0))
        except TimeoutError:
            raise LaunchError(
                f"Another `meshmend run` has a job in {folder}. Wait until it ends, or give this one a folder of its "
                "own: --shared DIR."
            ) from None
        job, left, killed = Watch(folder), list(kills), list[tuple[Kill, float]]()
        job.read()
        n_hosts = f"{len(machine)} host{'s' * (len(machine) != 1)}"
        screen.say(f"{machine}: {n_hosts} on this machine, files in {folder}")
        stack.enter_context(_telling_of_interrupts(screen, job, began))
        hosts = LocalJob(
            asked.argv,
            machine,
            folder,
            least=least,
            max_restarts=asked.max_restarts,
            warm=asked.warm,
            start_over=asked.start_over,
            state_wait_s=asked.state_wait_s,
            machine=asked.machine,
            secret=secret,
            environment=lambda host: {DOMAIN: domains[host]},
            on_line=screen.line,
            on_event=screen.event,
        )
        running = stack.enter_context(hosts)
        stack.enter_context(_announcing_interrupts(screen))
        running.start()
        while running.running:
            job.read()
            screen.look(job, began)
            # Hosts that are to die after the same step do so at the same moment.
            due = {each.step for each in left if _steps_of(job, each.host, began) >= each.step}
            dying = [each.host for each in left if each.step in due and each.host in running.running]
            left = [each for each in left if each.step not in due]
            died = [(host, running.kill(host)) for host in dying]
            job.read()  # they went on until they died
            for host, at in died:
                step = _steps_of(job, host, began)
                killed.append((Kill(host, step), at))
                screen.lost(at)
                screen.say(f"host {host} is killed after step {step}, its memory is lost", "bold red")
            running.watch(WATCH_S)
        job.read()
        screen.look(job, began)
        screen.flush()
        statuses = running.statuses
        if screen.over is None or not screen.over["ok"]:
            raise LaunchError(_why(screen, statuses))
        _summarise(screen, job, began, killed, left, statuses)


def _steps_of(job: Watch, host: int, since: float) -> int:
    """Return the last step that a host has done in its last round, 0 if it has done none there since then."""
    last = job.latest.get(str(host))
    step = 0 if last is None or last.started < since else max(last.last, last.kept)
    return step if last is not None and step > last.resumed else 0


def _summarise(
    screen: Screen,
    job: Watch,
    began: float,
    killed: list[tuple[Kill, float]],
    left: list[Kill],
    statuses: dict[int, int],
) -> None:
    for one, at in killed:
        if job.recovery(at) is None:
            screen.say(f"host {one.host} was killed after step {one.step}; no step was done without it", "bold red")
    for one in left:
        step = _steps_of(job, one.host, began)
        ended = f"the job ended after step {step}" if step else "the job did no step"
        screen.say(f"host {one.host} was not killed: {ended}", "bold yellow")
    for host, status in statuses.items():
        if status:
            screen.say(f"host {host} has ended with {name_code(status)}; the others finished without it", "bold yellow")
    screen.tell_raised()
    rounds = [one for one in rounds_of(job.histories.values()) if one.started > began]
    if rounds:
        step, chips = rounds[-1].last, ", then ".join(str(n) for n, _ in groupby(one.chips for one in rounds))
        took = f"{time.time() - began:.0f} s"
        screen.say(f"done: {step} step{'s' * (step != 1)} on {chips} chips in {took}", "bold green")
    else:
        screen.say(f"done: {screen.over['why'] if screen.over else 'all hosts have finished'}", "bold green")
