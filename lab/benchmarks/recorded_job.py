"""A job that ran, as a replay needs it: its failures and typical durations, from the timelines of its hosts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from meshmend.errors import LaunchError
from meshmend.launch.goodput import HostHistory, Recovery, TimeAccount
from meshmend.launch.hosts import Hosts
from meshmend.launch.timeline import STAGES, Line, read_timeline
from meshmend.launch.watching import Watch

DETECT, TRAINING = "detect", "training"


@dataclass(frozen=True)
class HostFailure:
    """A host was lost `at_s` seconds after the job began, and back `away_s` later; None if it was not back by the end.

    `at_s` is 0 for a host that was missing from the start, `away_s` is 0 if the job stopped and no host was missing.
    """

    at_s: float
    host: int
    away_s: float | None


@dataclass(frozen=True)
class RecordedJob:
    """What is known of a job that ran: what the simulator is given, and `measured`, which it has to come close to."""

    shape: tuple[int, ...]
    host: tuple[int, ...]
    until_s: float
    """From the first start to the last step."""
    failures: tuple[HostFailure, ...]
    first_start_s: Mapping[str, float]
    """From the first start to the first step, by stage."""
    stages_s: Mapping[str, float]
    """Median of each stage of a recovery from a loss."""
    returns_s: Mapping[str, float]
    """Median of each stage of taking hosts back; as after a loss, without its detection, if none came back."""
    step_s: Mapping[int, float]
    """Median time between two steps, by the number of chips."""
    data_s: float
    """Typical wait for data per step."""
    checkpoint_steps: float
    """Steps between two checkpoints; infinite if there are none."""
    checkpoint_s: float
    """Median of how long training waits for a checkpoint."""
    steps_again: float
    """Median of the steps that are done again after a failure."""
    steps_on_start: float
    """Median of the steps that a recovery itself brings: its first one, and those whose end nobody could record."""
    measured: RunAccount
    wrap: tuple[bool, ...] = ()
    """For each axis, whether it wraps; empty if none does."""


@dataclass(frozen=True)
class RunAccount:
    """How a job spent its time on the clock, in seconds by cause; `TRAINING` is one of them."""

    steps: float
    spent_s: Mapping[str, float]
    stops: int

    @property
    def goodput(self) -> float:
        """Share of the time that went into steps that count."""
        return self.spent_s[TRAINING] / math.fsum(self.spent_s.values())


def read_record(folder: str | Path, machine: Hosts | None = None) -> RecordedJob:
    """Read a job's timelines from its shared folder.

    `machine` is for jobs whose timelines do not say what mesh they ran on, where devices report their coordinates.
    """
    watch = Watch(folder)
    watch.read()
    account = watch.account()
    if not watch.histories:
        raise LaunchError(
            f"There are no timelines in {folder}. Give the folder that the job was started with, as in "
            "`meshmend run --shared DIR`."
        )
    if account is None:
        raise LaunchError(f"The job in {folder} has not done a step: there is nothing to replay yet.")
    hosts = _machine(account, machine, folder)
    if not account.recoveries:
        raise LaunchError(
            f"The job in {folder} has not been interrupted in its {account.step:,} steps: there is no failure to "
            "replay. `meshmend watch` shows where its time went."
        )
    histories = list(watch.histories.values())
    step_s = _step_times(histories)
    if not step_s:
        raise LaunchError(f"The job in {folder} has nowhere done two steps in a row: how long one takes is not known.")
    inner = Path(folder) / "timeline"
    every, pause_s = _checkpoints(sorted((inner if inner.is_dir() else Path(folder)).glob("host-*.jsonl")))
    stages = list(dict.fromkeys((*STAGES, *(stage for one in account.recoveries for stage in one.stages_s))))
    returns = [one for one in account.recoveries if one.joined and not one.lost]
    losses = [one for one in account.recoveries if one not in returns]
    again = [one.step - one.resumed for one in account.recoveries]
    causes = {cause: seconds for cause, seconds in account.badput_s.items() if cause != "under way"}
    return RecordedJob(
        shape=hosts.shape,
        wrap=hosts.wrap,
        host=hosts.tile,
        until_s=account.last_step_at - account.began,
        failures=tuple(_failures(account, watch, len(hosts))),
        first_start_s={
            stage: max(
                0.0, causes.get(stage, 0.0) - math.fsum(one.stages_s.get(stage, 0.0) for one in account.recoveries)
            )
            for stage in STAGES
        },
        stages_s=_medians(losses or returns, stages),
        returns_s=_medians(returns, stages) if returns else _medians(losses, stages) | {DETECT: 0.0},
        step_s=step_s,
        data_s=_data_wait(histories),
        checkpoint_steps=every,
        checkpoint_s=pause_s,
        steps_again=statistics.median(max(0, steps) for steps in again),
        steps_on_start=1 + statistics.median(max(0, -steps) for steps in again),
        measured=RunAccount(account.step, {TRAINING: account.training_s, **causes}, len(account.recoveries)),
    )


def _machine(account: TimeAccount, given: Hosts | None, folder: str | Path) -> Hosts:
    if not account.hosts:
        raise LaunchError(
            f"The timelines in {folder} do not say which hosts trained, so their failures cannot be replayed."
        )
    if not account.machine:
        if given is None:
            raise LaunchError(
                f"The timelines in {folder} do not say what mesh the job ran on. Give its shape and its hosts', as in: "
                f"python lab/benchmarks/replay.py {folder} --mesh 8x8 --host 4x2."
            )
        return given
    found = Hosts.read(account.machine)
    if given is not None and (found.shape, found.tile) != (given.shape, given.tile):
        raise LaunchError(f"The job in {folder} ran on {found}, got {given}. Leave the shape out.")
    return found


def _failures(account: TimeAccount, watch: Watch, n_hosts: int) -> Iterable[HostFailure]:
    """Return when each host was lost, and for how long it was away."""
    first = account.recoveries[0]
    there = (set(first.hosts) - set(first.joined)) | set(first.lost)
    lost_at = dict.fromkeys(set(range(n_hosts)) - there, 0.0)
    for one in account.recoveries:
        at = one.at - account.began
        for host in one.joined:
            if host in lost_at:
                began = lost_at.pop(host)
                yield HostFailure(began, host, at - began)
        if not one.lost and not one.joined:
            yield HostFailure(at, one.hosts[0], 0.0)
        lost_at |= {host: at + later for host, later in _in_turn(one, watch).items()}
    for host, began in lost_at.items():
        yield HostFailure(began, host, None)


def _in_turn(one: Recovery, watch: Watch) -> dict[int, float]:
    """Return how much later than the first each lost host was lost, by its last sign of life; within the recovery."""
    ended = {}
    for host in one.lost:
        history = watch.histories.get(str(host))
        before = [part.ended for part in history.rounds if part.started <= one.at] if history is not None else []
        ended[host] = max([one.at, *before[-1:]])
    earliest = min(ended.values(), default=0.0)
    return {host: min(at - earliest, one.total_s) for host, at in ended.items()}


def _medians(restarts: Sequence[Recovery], stages: Sequence[str]) -> dict[str, float]:
    return {stage: statistics.median(one.stages_s.get(stage, 0.0) for one in restarts) for stage in stages}


def _step_times(hosts: Sequence[HostHistory]) -> dict[int, float]:
    """Return the median time of a step by the number of chips, over all hosts: they train in step."""
    found: dict[int, list[float]] = {}
    for one in (part for host in hosts for part in host.rounds if part.chips):
        times = [(until - since) / (after - before) for (before, since), (after, until) in pairwise(one.marks)]
        found.setdefault(one.chips, []).extend(times)
    return {chips: statistics.median(times) for chips, times in found.items() if times}


def _data_wait(hosts: Sequence[HostHistory]) -> float:
    """Return how long a step typically waits for its data: the median over the rounds of their mean."""
    rounds = [one for host in hosts for one in host.rounds if len(one.marks) > 1]
    return statistics.median([one.data_s / (one.marks[-1][0] - one.marks[0][0]) for one in rounds] or [0.0])


def _checkpoints(paths: Sequence[Path]) -> tuple[float, float]:
    """Return how many steps are between two checkpoints, and how long training waits for one."""
    most: list[Line] = []
    for path in paths:
        events = [event for event in read_timeline(path) if event["event"] in ("checkpoint", "saved")]
        most = max(most, events, key=len)
    steps = sorted({0, *(event["step"] for event in most if "step" in event)})
    if len(steps) < 2:
        return math.inf, 0.0
    every = statistics.median(after - before for before, after in pairwise(steps))
    pauses = [event["seconds"] for event in most if event["event"] == "checkpoint" and "seconds" in event]
    return float(every), statistics.median(pauses or [0.0])
