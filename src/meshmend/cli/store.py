"""`meshmend store`: the rendezvous store of a job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from meshmend.buckets import Folder, refuse_bucket
from meshmend.cli.options import MetricsOption, option
from meshmend.cli.terminal import plain
from meshmend.errors import LaunchError
from meshmend.extras import require
from meshmend.launch.addresses import split_address
from meshmend.launch.environment import check_address, file_name, find_job, find_secret
from meshmend.launch.membership import Membership
from meshmend.launch.messages import DEFAULT_PORT
from meshmend.launch.metrics import serve_metrics
from meshmend.launch.processes import raise_file_limit
from meshmend.launch.store import Store

JobOption = Annotated[
    str | None, option("--job", "NAME", "The job's name.", show_default="MESHMEND_JOB, Slurm's number, or job")
]
SecretOption = Annotated[
    Path | None,
    option("--secret-file", "FILE", "The job's secret, the same everywhere.", show_default="MESHMEND_SECRET"),
]


def command(
    listen: Annotated[
        str, option("--listen", "ADDR:PORT", "Where to listen; 0.0.0.0 or [::] for the whole network.")
    ] = f"127.0.0.1:{DEFAULT_PORT}",
    folder: Annotated[
        Path | None,
        option("--folder", "DIR", "For the hosts' events: `meshmend watch DIR`.", show_default="the job's name"),
    ] = None,
    job: JobOption = None,
    secret_file: SecretOption = None,
    metrics: MetricsOption = None,
) -> None:
    """Serve a job's hosts: decide which are in a round, report failures, and record events.

    Run it on a machine that does not die with a host. It ends when the job is over. Beyond this machine it needs a
    secret: openssl rand -hex 32 > secret; chmod 600 secret.

    Example: meshmend store --listen 10.0.0.7:29400 --secret-file secret
    """
    refuse_bucket(folder, "the store keeps events alone, at the ends of files, so give --folder DIR")
    address, port = split_address(check_address(listen, "--listen"))
    name, secret = find_job(job), find_secret(secret_file)
    kept = (folder or Path(file_name(name))).absolute()
    metrics = check_metrics(metrics, kept)

    def log(line: str) -> None:
        # Past the buffer of sys.stdout: what that cannot write it tries to write at the end, and fails or hangs.
        text = f"{time.strftime('%H:%M:%S')} {plain(line)}\n"
        os.write(sys.stdout.fileno(), text.encode(sys.stdout.encoding, sys.stdout.errors or "strict"))

    raise_file_limit()
    with (
        Store(Membership(), job=name, secret=secret, address=address, port=port, folder=kept, log=log) as store,
        serving(metrics, kept),
    ):
        over = store.serve()
    if not over["ok"]:
        raise LaunchError(f"The job failed: {over['why']}.")


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
