"""Which script a job's folder belongs to, so that another one that finds its state can say whose it is.

A folder is a job. Two scripts that are given one folder are taken for one job: the second one finds all steps done, or
a state of another model. The folder cannot know which of them is meant, but it knows which script last trained there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from meshmend.errors import RestartError, TransientError
from meshmend.files import write_whole

LOGGER = logging.getLogger(__name__)
FILE = "script.json"
MAX_BYTES = 10_000
NOT_A_FILE = "an interactive session"
ADVICE = "give each script a folder of its own: Job(shared=…), and the same to `meshmend run --shared`."


@dataclass(frozen=True)
class Script:
    """A script that trains: where it is, a digest of its text, and when it first trained in a folder."""

    path: str
    digest: str
    began: str = field(compare=False)

    @classmethod
    def running(cls) -> Script:
        """Describe the script of this process."""
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        path = None if file is None else Path(file).absolute()
        digest = ""
        with suppress(OSError):
            digest = "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return cls(
            NOT_A_FILE if path is None else str(path), digest, datetime.now(UTC).strftime("%Y-%m-%d at %H:%M UTC")
        )

    @classmethod
    def of(cls, folder: Path) -> Script | None:
        """Return the script that last trained in a shared folder; None if that is not known."""
        try:
            with (folder / FILE).open("rb") as file:
                facts = json.loads(file.read(MAX_BYTES))
            words = [facts[name] for name in ("path", "digest", "began")]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        return cls(*words) if all(isinstance(word, str) and word.isprintable() for word in words) else None

    def write(self, folder: Path) -> None:
        """Write it into the shared folder; where that cannot be written to, others say so."""
        with suppress(OSError):
            write_whole(folder / FILE, json.dumps(asdict(self), indent=1) + "\n")


def begin(folder: Path, done: int, last: int) -> None:
    """Say what a script begins with, where that may not be meant, and that it trains in this folder from now on.

    `done` is the step that it goes on from, `last` the one that it is to reach. For process 0.
    """
    kept, mine = Script.of(folder), Script.running()
    other = _difference(folder, kept, mine)
    if 0 < last <= done:
        LOGGER.warning(
            "All %d steps of the job in %s are done already. %sFor more, ask for more steps; to begin anew, give Job "
            "another folder, or remove this one.",
            done,
            folder,
            f"{other} " if other else "",
        )
        return
    if done and other and kept is not None and kept.path != mine.path:
        LOGGER.warning("%s It goes on after step %d. If that is not meant, %s", other, done, ADVICE)
    if other or kept is None:
        mine.write(folder)


@contextmanager
def naming_the_writer(folder: Path) -> Iterator[None]:
    """Let an error about the state in a folder say whose state it is, if it is another script's."""
    try:
        yield
    except RestartError as error:
        other = _difference(folder, Script.of(folder), Script.running())
        if other and not isinstance(error, TransientError):
            error.args = (f"{error} {other} Otherwise {ADVICE}",)
        raise


def _difference(folder: Path, kept: Script | None, mine: Script) -> str:
    """Return a sentence that says which script a folder's state is from; "" if it is this one's, or not known."""
    if kept is None or kept == mine:
        return ""
    what = f"The state in {folder} is from {kept.path}, which first trained there on {kept.began}"
    if kept.path == mine.path:
        return f"{what} and has been changed since."
    return f"{what}; this script is {mine.path}."
