"""`ip`, `tc` and `sysctl`, run for a lab, and the list of existing namespaces.

The commands inherit the lock of their lab. A process that is killed leaves behind the command that it was waiting for,
and the lock is free only when that has ended too, so removing a lab never races with building it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from meshmend_lab.errors import LabError

NETNS = Path("/run/netns")
"""Where `ip netns` keeps the names of namespaces."""


class Commands:
    """Commands of a process that holds a lab's lock."""

    def __init__(self, lock: int) -> None:
        self._lock = lock

    def ip(self, *lines: str, namespace: str | None = None, force: bool = False) -> None:
        """Run `ip` commands as one batch; with `force`, run all of them even if some fail."""
        words = ["ip"] + (["-n", namespace] if namespace else []) + (["-force"] if force else [])
        self.run(*words, "-batch", "-", lines=list(lines), check=not force)

    def run(self, *words: str, lines: list[str] | None = None, check: bool = True) -> None:
        """Run one command, with these lines as its input."""
        text = None if lines is None else "\n".join(lines) + "\n"
        done = subprocess.run(  # noqa: S603
            words, input=text, capture_output=True, text=True, check=False, pass_fds=[self._lock]
        )
        if check and done.returncode != 0:
            why = " ".join(done.stderr.split())[:500] or f"exit code {done.returncode}"
            raise LabError(f"{' '.join(words[:6])} failed: {why}")


def listed_namespaces(prefix: str) -> list[str]:
    """Return the namespaces whose names start with `prefix`, incomplete ones included."""
    try:
        return sorted(path.name for path in NETNS.iterdir() if path.name.startswith(prefix))
    except FileNotFoundError:
        return []
