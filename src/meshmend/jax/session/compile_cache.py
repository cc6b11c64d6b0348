"""JAX's persistent compile cache, set so that a restart finds everything in it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshmend.files import who_else_writes


def use_compile_cache(folder: str | Path | None) -> None:
    """Keep every compiled program in a folder that all hosts share; by default JAX_COMPILATION_CACHE_DIR.

    Only process 0 writes, which is JAX's own rule. JAX runs what it finds there, and asks nobody who has put it there:
    so a folder that another user can write to is not used, and a warning says so.
    """
    folder = str(folder or os.environ.get("JAX_COMPILATION_CACHE_DIR", ""))
    if not folder:
        return
    who = "" if "://" in folder else _who_else_writes(Path(folder))
    if who:
        warnings.warn(
            f"{folder} {who}, and JAX would run whatever program is put there: it compiles without a cache. Let only "
            f"this user write to it (chmod go-w {folder}), or name another folder by JAX_COMPILATION_CACHE_DIR.",
            RuntimeWarning,
            stacklevel=2,
        )
        use_no_compile_cache()
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    # After a restart every compile counts, however short.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def use_no_compile_cache() -> None:
    """Let nothing be written to a compile cache or read from it, from now on.

    For jobs on CPU devices, which save what they compile. A program of XLA's for CPUs that was read from JAX's cache
    cannot be written again: the file lacks its functions, loads, and fails when it runs ("Function wrapped_broadcast
    not found"). Nor would any process but the first find anything there, as JAX's keys differ between processes.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX reads that setting once, when it first compiles; a script may have done so


def _who_else_writes(folder: Path) -> str:
    """Return why a folder is not this user's alone, "" if it is; make it if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return who_else_writes(folder)
    except OSError as error:
        return f"cannot be used ({error.strerror})"
