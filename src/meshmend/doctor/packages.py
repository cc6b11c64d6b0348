"""Packages: which are installed, and in which version. Nothing is imported, so a broken package does no harm."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from meshmend.extras import TESTED, install_hint, version_of

Status = Literal["works", "absent", "broken"]
Section = Literal["packages", "engines", "devices", "network"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    `absent` is not installed, which is no fault. `broken` is installed and does not work. Both say what to do in
    `advice`, a command where possible. `seconds` is how long the probe took.
    """

    section: Section
    name: str
    status: Status
    detail: str
    advice: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Package:
    """A package: its module, its distribution, what it is for, and how to install it."""

    module: str
    distribution: str
    purpose: str
    install: str


PACKAGES = (
    Package("numpy", "numpy", "everything", install_hint()),
    Package("scipy", "scipy", "everything", install_hint()),
    Package("matplotlib", "matplotlib", "pictures and plots", install_hint("draw")),
    Package("jax", "jax", "the JAX engine", install_hint("jax")),
    Package("jaxlib", "jaxlib", "the JAX engine", install_hint("jax")),
    Package("optax", "optax", "train_step of the JAX engine", install_hint("jax")),
    Package("libtpu", "libtpu", "meshmend compile, and TPUs", install_hint("tpu")),
    Package("orbax.checkpoint", "orbax-checkpoint", "checkpoints of a JAX job", "pip install orbax-checkpoint"),
    Package("grain", "grain", "data of a JAX job that restarts", "pip install grain"),
    Package("gcsfs", "gcsfs", "a job's shared folder in a bucket", install_hint("gcs")),
    Package("torch", "torch", "the PyTorch engine", install_hint("torch")),
    Package("torchft", "torchft", "the PyTorch engine's recovery in place", install_hint("torch")),
)
NEEDED = ("numpy", "scipy")


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    name, _, rest = module.partition(".")
    spec = importlib.util.find_spec(name)
    if spec is None or not rest:
        return spec is not None
    # Finding the spec of a submodule would import its parent; searching the parent's folders does not.
    folders = spec.submodule_search_locations or []
    return importlib.machinery.PathFinder.find_spec(module, list(folders)) is not None


def look_at_packages() -> Iterator[Finding]:
    """Yield a finding for Python and for each package."""
    yield Finding("packages", "Python", "works", platform.python_version())
    least = _least_versions()
    for package in PACKAGES:
        yield _look_at(package, least.get(package.distribution))


def _look_at(package: Package, least: str | None) -> Finding:
    name = package.distribution
    if not is_installed(package.module):
        status: Status = "broken" if name in NEEDED else "absent"
        return Finding("packages", name, status, f"not installed: {package.purpose}", package.install)
    version = version_of(name)
    if version is None:
        return Finding("packages", name, "works", "installed, of unknown version")
    if least is not None and _numbers(version) < _numbers(least):
        advice = f"pip install -U '{name}>={least}'"
        return Finding("packages", name, "broken", f"{version}, but meshmend needs {least} or later", advice)
    tested = f"; tested with {', '.join(TESTED[name])}" if name in TESTED else ""
    return Finding("packages", name, "works", version + tested)


def _least_versions() -> dict[str, str]:
    """Return the version that meshmend requires of each package, from its own metadata."""
    try:
        asked = metadata.requires("meshmend") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", line) for line in asked)
    return {match[1]: match[2] for match in found if match is not None}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
