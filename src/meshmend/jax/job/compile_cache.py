"""JAX's persistent compile cache, set so that a restart finds everything in it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import jax


def use_compile_cache(folder: str | Path | None) -> None:
    """Keep every compiled program in a folder that all hosts share; by default JAX_COMPILATION_CACHE_DIR.

    Only process 0 writes, which is JAX's own rule. On CPU JAX 0.10 also puts what a process sees of the machine's
    topology into the key, which is different on each, so that all others never find anything: there the devices'
    kinds are taken instead, JAX's own way where a platform has no topology.
    """
    folder = folder or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # After a restart every compile counts, however short.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if not _share_keys_on_cpu():
        warnings.warn(
            f"JAX {jax.__version__} makes the keys of its compile cache in a way that meshmend does not know: on CPU "
            "only process 0 may find anything there.",
            stacklevel=2,
        )


def _share_keys_on_cpu() -> bool:
    """Take the devices' kinds into the key on CPU; say whether JAX has the places for that, which are not public."""
    try:
        from jax._src import cache_key

        by_topology, by_kind = cache_key._hash_accelerator_config, cache_key._hash_devices
    except (ImportError, AttributeError):
        return False
    if getattr(by_topology, "from_meshmend", False):
        return True

    def hash_config(hash_obj: Any, devices: Any) -> None:
        (by_kind if devices.flat[0].platform == "cpu" else by_topology)(hash_obj, devices)

    hash_config.from_meshmend = True  # type: ignore[attr-defined]
    cache_key._hash_accelerator_config = hash_config  # type: ignore[assignment]
    return True
