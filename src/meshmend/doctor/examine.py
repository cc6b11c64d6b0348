"""Check the packages, then try every engine that is installed.

Each is tried in a separate process with a time limit, so one that crashes or hangs is a finding like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmend.doctor.network import look_at_network
from meshmend.doctor.packages import Finding, Section, is_installed, look_at_packages
from meshmend.extras import install_hint

TIMEOUT_S = 180.0
"""Enough for JAX or torch on a busy machine; whatever takes longer counts as hung."""


@dataclass(frozen=True)
class Trial:
    """An engine, the probe that tries it, the modules it requires, and the command that installs them."""

    name: str
    probe: str
    needs: tuple[str, ...] = ()
    install: str = install_hint()


TRIALS = (
    Trial("NumPy", "try_numpy"),
    Trial("drawing", "try_drawing", ("matplotlib",), install_hint("draw")),
    Trial("JAX", "try_jax", ("jax", "jaxlib", "optax"), install_hint("jax")),
    Trial("TPU compiler", "try_libtpu", ("jax", "jaxlib", "optax", "libtpu"), install_hint("tpu")),
    Trial("PyTorch", "try_torch", ("torch",), install_hint("torch")),
    Trial("torchft", "try_torchft", ("torch", "torchft"), install_hint("torch")),
)


def examine(*, timeout_s: float = TIMEOUT_S, on_trial: Callable[[str], None] | None = None) -> list[Finding]:
    """Return all findings in the order of the report. Errors become findings; nothing here raises."""
    report = on_trial or (lambda _: None)
    found = list(look_at_packages())
    sight: dict[str, Any] = {}
    if is_installed("jax"):
        report("what JAX sees")
        finding, sight = run_probe("devices", "JAX sees", "see_jax", jax_environment(), timeout_s, install_hint("jax"))
        devices = [finding, *_holes(sight)]
    else:
        devices = [Finding("devices", "JAX sees", "absent", "JAX is not installed", install_hint("jax"))]
    if os.environ.get("MESHMEND_SHARED"):
        devices.append(run_probe("devices", "job's folder", "try_shared", {}, timeout_s, install_hint("gcs"))[0])
    for trial in TRIALS:
        report(trial.name)
        found.append(_try(trial, sight, timeout_s))
    report("the network")
    return found + devices + list(look_at_network())


def _try(trial: Trial, sight: Mapping[str, Any], timeout_s: float) -> Finding:
    missing = [module for module in trial.needs if not is_installed(module)]
    if missing:
        detail = f"not tried, without {', '.join(missing)}"
        return Finding("engines", trial.name, "absent", detail, trial.install)
    environment = {}
    if trial.probe == "try_jax":
        environment = jax_environment()
        if sight.get("platform") != "tpu":
            environment = virtual_devices(16)
    elif trial.probe == "try_libtpu":
        # Compiling needs no device, and searching for a TPU that is not there takes minutes.
        environment = {"JAX_PLATFORMS": "cpu"}
    return run_probe("engines", trial.name, trial.probe, environment, timeout_s, trial.install)[0]


def _holes(sight: Mapping[str, Any]) -> Iterator[Finding]:
    if not sight:
        return
    if sight["wrong"] is not None:
        advice = "correct MESHMEND_SHAPE, MESHMEND_FAILED and MESHMEND_WRAP, or unset them"
        yield Finding("devices", "holes", "broken", sight["wrong"], advice)
    elif sight["mesh"] is None:
        detail = "these devices have no coordinates, so the mesh is unknown"
        yield Finding("devices", "holes", "absent", detail, "export MESHMEND_SHAPE=8x8, or whatever mesh they form")
    else:
        holes = ", ".join(sight["holes"]) or "none"
        yield Finding("devices", "holes", "works", f"{holes}; {sight['mesh']}")


def jax_environment() -> dict[str, str]:
    """Return what to set for JAX: nothing, unless libtpu would spend minutes searching for a TPU that is not there."""
    has_tpu = any(Path("/dev").glob("accel*")) or any(Path("/dev").glob("vfio/[0-9]*"))
    if "JAX_PLATFORMS" in os.environ or has_tpu or not is_installed("libtpu"):
        return {}
    return {"JAX_PLATFORMS": "cpu"}


def run_probe(
    section: Section,
    name: str,
    probe: str,
    environment: Mapping[str, str],
    timeout_s: float,
    install: str,
    *,
    module: str = "meshmend.doctor.probes",
) -> tuple[Finding, dict[str, Any]]:
    """Run a probe in a process group of its own; return the finding and the probe's facts (none if it is broken).

    `install` is the command that installs what is tried; running it again may fix what is broken. `module` has the
    probe and a `main`.
    """
    words = ["-m", module, probe]
    again = " ".join([*(f"{key}={shlex.quote(value)}" for key, value in environment.items()), "python", *words])
    anew = "--reinstall" if install.startswith("apt-get") else "--force-reinstall"
    advice = f"{install.replace(' install', f' install {anew}')}\nthe whole error: {again}"
    started = time.perf_counter()
    facts, failure = ask(words, environment, timeout_s)
    took = time.perf_counter() - started
    if failure is None and "detail" in facts:
        return Finding(section, name, "works", str(facts["detail"]), seconds=took), facts
    return Finding(section, name, "broken", failure or "no answer", advice, took), {}


def ask(words: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> tuple[dict[str, Any], str | None]:
    """Run Python with these words in a process group of its own; return the JSON object in its last line of output.

    The second value says what went wrong, None if nothing did.
    """
    with subprocess.Popen(  # noqa: S603  # our own modules, in our own interpreter
        [sys.executable, *words],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, complaints = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {}, f"no answer within {timeout_s:g} s"
        finally:
            # Whatever the process started ends with it, even if the process itself has finished.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    ending = lines[-1][:300] if lines else f"ended with exit code {process.returncode} and no output"
    try:
        facts = json.loads(output.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {}, ending
    return (facts, None) if isinstance(facts, dict) and not process.returncode else ({}, ending)


def virtual_devices(n_devices: int) -> dict[str, str]:
    """Return what to set so that a process of JAX has so many virtual CPU devices: JAX reads it once per process."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={n_devices}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
