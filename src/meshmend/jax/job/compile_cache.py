"""JAX's persistent compile cache, set so that a restart finds everything in it."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def use_compile_cache(folder: str | Path | None) -> None:
    """Keep every compiled program in a folder that all hosts share; by default JAX_COMPILATION_CACHE_DIR.

    Only process 0 writes, which is JAX's own rule.
    """
    folder = folder or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # After a restart every compile counts, however short.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def use_no_compile_cache() -> None:
    """Let nothing be written to a compile cache or read from it, before anything is compiled.

    For jobs on CPU devices, which save what they compile. A program of XLA's for CPUs that was read from JAX's cache
    cannot be written again: the file loads, and fails when it runs ("Function wrapped_broadcast not found"). Nor would
    any process but the first find anything there, as JAX's keys differ between processes.
    """
    jax.config.update("jax_enable_compilation_cache", False)
