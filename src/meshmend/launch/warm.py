"""Workers that start in milliseconds: a process that has imported JAX already, and forks one for every round.

    python -m meshmend.launch.warm DESCRIPTOR

Importing JAX and what a training script needs takes seconds, at every restart. This process imports it once, touches no
device, starts no thread, and then waits: a fork of it is a worker that has everything imported. It is the agent's child
and the worker's parent, and each dies with its parent.

It speaks JSON lines with the agent over a socket: `{"start": {"argv": …, "environment": …}}` and `{"signal": 15}` come
in, `{"ready": …}`, `{"pid": …}` and `{"ended": code}` go out. A code below zero is the signal that ended the worker.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshmend.launch.failure import await_stop, report_failure
from meshmend.launch.processes import die_with_parent

MODULES = (
    "jax",
    "optax",
    "flax.nnx",
    "flax.linen",
    "grain",
    "orbax.checkpoint",
    "scipy.optimize",
    "scipy.sparse.csgraph",
    "meshmend.jax",
    "meshmend.jax.session",
    "meshmend.jax.state",
    "meshmend.jax.compile",
)
"""What is imported before the first worker, as far as it is installed. None of it starts a thread when imported."""
PRELOADED = "MESHMEND_PRELOADED"
"""The settings of JAX that its import has read: a worker that changes one of them must be told that it is too late."""


def jax_settings() -> dict[str, str]:
    """Return the environment variables that JAX reads when it is imported."""
    return {name: value for name, value in os.environ.items() if name.startswith("JAX_")}


def main(descriptor: int, *, preload: Sequence[str] = MODULES) -> None:
    """Import, then fork workers for the agent at the other end of a socket, until it closes it."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends them to all processes: the agent decides what they mean
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    for module in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # or a worker's collector would touch, and so copy, all that was imported
    loaded = jax_settings()
    _send_message(control, {"ready": True, "threads": _threads()})
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        worker, watch = 0, -1
        while True:
            for selected, _ in selector.select():
                if selected.fileobj is not control:
                    _, status = os.waitpid(worker, 0)
                    selector.unregister(watch)
                    os.close(watch)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(worker, signal.SIGKILL)  # what the worker has started dies with it
                    worker = 0
                    _send_message(control, {"ended": os.waitstatus_to_exitcode(status)})
                    continue
                data = control.recv(1 << 16)
                if not data:
                    return
                # Not through a file: the selector does not see the lines that wait in its buffer.
                *lines, rest = (rest + data).split(b"\n")
                for command in map(json.loads, lines):
                    if "signal" in command and worker:
                        os.kill(worker, command["signal"])
                    elif "start" in command:
                        mine = os.getpid()
                        worker = os.fork()
                        if worker == 0:
                            die_with_parent(mine)
                            control.close()
                            _become_worker(bool(preload), loaded, **command["start"])
                            return
                        watch = os.pidfd_open(worker)
                        selector.register(watch, selectors.EVENT_READ)
                        _send_message(control, {"pid": worker})


def _become_worker(warm: bool, loaded: dict[str, str], argv: list[str], environment: dict[str, str]) -> None:
    """Be the worker: run the script as Python would. What it raises, and how it exits, leaves `main`."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    if not warm or _threads() > 1:
        os.execv(sys.executable, [sys.executable, *argv])  # noqa: S606  # the interpreter that the user chose
    os.environ[PRELOADED] = json.dumps(loaded)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.orig_argv = [sys.executable, *argv]
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], str(Path.cwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).absolute().parent)
        runpy.run_path(argv[0], run_name="__main__")


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _send_message(control: socket.socket, message: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        control.sendall(json.dumps(message).encode() + b"\n")


def run(descriptor: int, *, preload: Sequence[str] = MODULES) -> None:
    """Do what `main` does, and show what a script raises as Python does."""
    try:
        main(descriptor, preload=preload)
    except Exception as error:
        # runpy's own frames would hide the script's; an exception of a script prints as it does under Python.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        # A job has a hook of its own: leaving in order would mean waiting for processes that know nothing of the error.
        if sys.excepthook is sys.__excepthook__ and report_failure(error.with_traceback(trace)):
            await_stop()
        else:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


if __name__ == "__main__":
    run(int(sys.argv[1]), preload=() if "--cold" in sys.argv[2:] else MODULES)
