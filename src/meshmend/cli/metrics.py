"""The metrics of a job, for commands that serve them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshmend.buckets import Folder, refuse_bucket
from meshmend.errors import LaunchError
from meshmend.extras import require
from meshmend.launch.addresses import split_address
from meshmend.launch.environment import check_address
from meshmend.launch.metrics import serve_metrics


def check_metrics(where: str | None, shared: Folder | None) -> str | None:
    """Return where to serve metrics, if that is possible."""
    if where is None:
        return None
    if shared is None:
        raise LaunchError("--metrics reads the job's timelines: give --shared DIR as well.")
    refuse_bucket(shared, "--metrics reads the timelines in the store's folder, so give it to `meshmend store`")
    require("prometheus_client", needed_for="--metrics", extra="operate")
    return check_address(where, "--metrics")


@contextmanager
def serving(where: str | None, shared: Folder | None) -> Iterator[None]:
    """Serve the job's metrics meanwhile, if that was asked for."""
    if where is None or shared is None:
        yield
        return
    shared.mkdir(parents=True, exist_ok=True)
    with serve_metrics(shared, *split_address(where)):
        yield
