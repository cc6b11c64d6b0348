"""A job's metrics for Prometheus, made from its timelines each time they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from meshmend.errors import LaunchError, QuarantineError
from meshmend.extras import require
from meshmend.launch.addresses import join_address
from meshmend.launch.goodput import HostRound, TimeAccount
from meshmend.launch.hosts import Hosts
from meshmend.launch.timeline import STAGES
from meshmend.launch.watching import STATES, Watch, read_quarantine
from meshmend.quarantine import THE_JOB, Quarantined
from meshmend.quarantine.entries import cables_of, chips_of
from meshmend.quarantine.report import refused

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BUCKETS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0, 1800.0)
"""Upper ends of the histogram of a recovery's stages, in seconds."""


class JobMetrics:
    """The metrics of one job: a collector for `prometheus_client`."""

    def __init__(self, folder: str | Path) -> None:
        self.watch = Watch(folder)
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Return the metrics as they are now."""
        with self._lock:
            self.watch.read()
            (account, state), latest, newest = self.watch.account_now(), self.watch.latest, self.watch.newest
            entries, problem = read_quarantine(self.watch.folder)
            n_refused = None  # where the observations cannot be read
            with suppress(QuarantineError, OSError):
                n_refused = len(refused(self.watch.folder))
        yield _gauge("meshmend_job_state", "1 for what the job does now.", {s: s == state for s in STATES}, "state")
        if account is not None:
            yield from _of_time(account)
            yield from _of_mesh(account, newest)
            yield from _of_state(newest, latest)
            if not problem:  # a damaged list is not an empty one
                yield from _of_quarantine(entries, n_refused, account.machine)
            yield _of_recoveries(account)


def _of_time(account: TimeAccount) -> Iterator[Metric]:
    yield _gauge("meshmend_goodput_ratio", "Share of the job's time that went into steps that count.", account.goodput)
    yield _counter("meshmend_training_seconds", "Time that went into steps that count.", account.training_s)
    yield _counter("meshmend_badput_seconds", "Time that went into anything else, by cause.", account.badput_s, "cause")
    yield _counter("meshmend_job_seconds", "Time since the job's first start.", account.total_s)
    yield _counter("meshmend_steps", "The last step that is done.", account.step)
    yield _gauge("meshmend_step_seconds", "Median time of a step since the last restart.", account.step_s)
    yield _gauge("meshmend_last_step_timestamp_seconds", "When the last step was done.", account.last_step_at)
    if account.loss is not None:
        yield _gauge("meshmend_loss", "Loss of the last step.", account.loss)


def _of_mesh(account: TimeAccount, newest: Sequence[HostRound]) -> Iterator[Metric]:
    n_chips, n_hosts, most = account.chips, len(account.hosts), account.most_hosts
    if account.machine:
        hosts = Hosts.read(account.machine)
        n_chips, most = len(hosts) * hosts.chips_per_host, len(hosts)
    live = {"live": account.chips, "failed": n_chips - account.chips}
    yield _gauge("meshmend_chips", "Chips of the machine.", live, "state")
    yield _gauge("meshmend_hosts", "Hosts of the machine.", {"live": n_hosts, "lost": max(0, most - n_hosts)}, "state")
    if account.least_hosts:
        yield _gauge("meshmend_hosts_needed", "Hosts below which the job waits.", account.least_hosts)
    if n_hosts > 1:  # nobody would go on after the loss of the only one
        # Each host compiles for some losses.
        covered = {host for one in newest for host in one.covered} & {*account.hosts}
        ratio = len(covered) / n_hosts
        yield _gauge(
            "meshmend_compiled_ahead_ratio", "Share of the hosts whose loss is planned and compiled for.", ratio
        )


def _of_state(newest: Sequence[HostRound], latest: dict[str, HostRound]) -> Iterator[Metric]:
    if kept := [one for one in newest if one.kept]:
        oldest = min(kept, key=lambda one: one.kept)
        yield _gauge("meshmend_copies_step", "Last step of which every host has a copy in memory.", oldest.kept)
        yield _gauge("meshmend_copies_timestamp_seconds", "When that copy was written.", oldest.kept_at)
        yield _gauge("meshmend_copies_interval_steps", "Steps between two copies in memory.", oldest.kept_every)
    if saved := [one for one in latest.values() if one.saved]:
        last = max(saved, key=lambda one: one.saved)
        yield _gauge("meshmend_checkpoint_step", "Step of the last checkpoint on disk.", last.saved)
        yield _gauge("meshmend_checkpoint_timestamp_seconds", "When it was complete.", last.saved_at)


def _of_quarantine(entries: Sequence[Quarantined], n_refused: int | None, machine: str) -> Iterator[Metric]:
    hosts = Hosts.read(machine) if machine else None
    n_hosts = 0 if hosts is None else len(hosts)
    known = [entry for entry in entries if entry.suspect.host is None or entry.suspect.host < n_hosts]
    yield _gauge("meshmend_quarantined_chips", "Chips on the quarantine list.", len(chips_of(known, hosts)))
    yield _gauge("meshmend_quarantined_cables", "Cables on the quarantine list.", len(cables_of(entries)))
    by_job = [entry for entry in known if entry.by == THE_JOB]
    n_found = len(chips_of(by_job, hosts))
    yield _gauge("meshmend_quarantined_by_job", "Chips on it that the job has found itself.", n_found)
    if n_refused is not None:
        help_ = "Suspects that are proven, but past the limit of what the job may leave out: it has stopped."
        yield _gauge("meshmend_quarantine_refused", help_, n_refused)


def _of_recoveries(account: TimeAccount) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(
        "meshmend_recovery_seconds", "Stages of recoveries; stage=total is all of one.", labels=["stage"]
    )
    for stage in (*STAGES, "total"):
        took = [one.total_s if stage == "total" else one.stages_s[stage] for one in account.recoveries]
        counts = [(str(edge), sum(seconds <= edge for seconds in took)) for edge in BUCKETS]
        family.add_metric([stage], buckets=[*counts, ("+Inf", len(took))], sum_value=sum(took))
    return family


def _gauge(name: str, help_: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(name, help_, labels=[label] * bool(label)), value)


def _counter(name: str, help_: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(name, help_, labels=[label] * bool(label)), value)


def _filled(family: Any, value: float | Mapping[str, float]) -> Metric:
    """Return a family with its value, or with one per value of its label."""
    for word, number in value.items() if isinstance(value, Mapping) else [(None, value)]:
        family.add_metric([] if word is None else [word], float(number))
    return cast("Metric", family)


@contextmanager
def serve_metrics(folder: str | Path, address: str, port: int) -> Iterator[None]:
    """Serve a job inside the `with` block, from a thread, at http://ADDRESS:PORT/metrics."""
    require("prometheus_client", needed_for="Serving metrics", extra="operate")
    from prometheus_client import CollectorRegistry, start_http_server

    of_job = CollectorRegistry(auto_describe=False)
    of_job.register(JobMetrics(folder))
    try:
        server, thread = start_http_server(port, address, of_job)
    except OSError as error:
        raise LaunchError(
            f"Metrics cannot be served at {join_address(address, port)}: {error.strerror}. Give another port, as in "
            f"--metrics {join_address(address, port + 1)}."
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
