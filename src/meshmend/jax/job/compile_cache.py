"""JAX's persistent compile cache, set so that a restart finds everything in it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import jax

from meshmend.jax.private import share_cache_keys_on_cpu


def use_compile_cache(folder: str | Path | None) -> None:
    """Keep every compiled program in a folder that all hosts share; by default JAX_COMPILATION_CACHE_DIR.

    Only process 0 writes, which is JAX's own rule. On CPU JAX 0.10 also puts each process's view of the
    topology into the key, so that the others never get a hit: there the devices' kinds are used instead, as JAX does
    where a platform has no topology.
    """
    folder = folder or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # After a restart every compile counts, however short.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if not share_cache_keys_on_cpu():
        warnings.warn(
            f"JAX {jax.__version__} computes the keys of its compile cache in a way that meshmend does not support: "
            "on CPU only process 0 may find anything there.",
            stacklevel=2,
        )
