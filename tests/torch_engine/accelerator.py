"""An accelerator for tests, `fake`: host memory that torch takes for a device, with streams that are asynchronous.

`build` compiles it, once per machine, source and torch. `Accelerator` loads it into the process that makes it, where
it is then torch's accelerator for good: tests make it in the processes that they fork, and never in their own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = os.environ.get("CXX", "g++")
MISSING = "" if shutil.which(COMPILER) else f"{COMPILER} is not installed, which compiles the fake accelerator"


def build() -> Path:
    """Return the compiled accelerator; 20 s of a core where it was not compiled before."""
    torch_folder = Path(torch.__file__).parent
    facts = SOURCE.read_text(encoding="utf-8"), torch.__version__, str(torch_folder), COMPILER
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"meshmend-accelerator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"{digest}.so"
    if not built.exists():
        include, library = torch_folder / "include", torch_folder / "lib"
        making = folder / f"{digest}.{os.getpid()}"
        words = [COMPILER, "-std=c++20", "-O0", "-fPIC", "-shared", str(SOURCE), "-o", str(making)]
        words += [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-I{sysconfig.get_path('include')}"]
        words += [f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch_cpu", "-lc10", "-ltorch"]
        subprocess.run(words, check=True, capture_output=True, text=True)
        making.rename(built)
    return built


class Accelerator:
    """The device's own module, `torch.fake`, as far as DDP, FSDP2, DeviceMesh and torchft use one; and its settings.

    A process makes it once.
    """

    Stream = functools.partial(torch.Stream, device="fake")
    Event = functools.partial(torch.Event, device="fake")

    def __init__(self, library: Path, *, delay_ms: float = 0) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("queued", "unpinned", "pinned"):
            getattr(self._library, f"accelerator_{name}").restype = ctypes.c_long
        torch.utils.rename_privateuse1_backend("fake")
        self._library.accelerator_register()
        torch._register_device_module("fake", self)
        torch.utils.generate_methods_for_privateuse1_backend()
        self.delay(delay_ms)

    def delay(self, ms: float) -> None:
        """Let every copy that does not block its caller wait this long before it is made."""
        self._library.accelerator_set_delay_us(int(ms * 1000))

    @property
    def queued(self) -> int:
        """How many copies did not block their callers."""
        return int(self._library.accelerator_queued())

    @property
    def unpinned(self) -> int:
        """How many of those were from or to host memory that is not pinned."""
        return int(self._library.accelerator_unpinned())

    @property
    def pinned(self) -> int:
        """How many blocks of pinned memory were made."""
        return int(self._library.accelerator_pinned())

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream("fake")

    def stream(self, stream: torch.Stream) -> Any:
        """Return the context in which a stream is the current one: torch's streams are that themselves."""
        return stream

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize("fake")
