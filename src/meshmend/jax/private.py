"""All that meshmend uses of JAX beyond its public API. No other module does (`tests/test_architecture.py`).

JAX may move any of this in a minor release, so the `jax` extra has an upper bound, and
`tests/jax_engine/test_private.py` has a test for each that says what breaks. Before the bound is raised, run those
against the new version.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax


class KeyValueStore:
    """The key-value store of JAX's coordination service, which JAX opens in `jax.distributed.initialize`.

    It has no public API. It raises `RuntimeError` where the service cannot be reached.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str, *, overwrite: bool = False) -> None:
        """Write a value; a key that has one is an error unless `overwrite`."""
        self._client.key_value_set(key, value, allow_overwrite=overwrite)

    def wait_for(self, key: str, timeout_s: float) -> str | None:
        """Return a value as soon as it is there; None if it is not by then."""
        try:
            return str(self._client.blocking_key_value_get(key, max(1, int(1000 * timeout_s))))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def get(self, key: str) -> str | None:
        """Return a value if it is there, without waiting."""
        try:
            return str(self._client.key_value_try_get(key))
        except RuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def delete(self, key: str) -> None:
        """Forget a value; one that is not there is no error."""
        self._client.key_value_delete(key)


def key_value_store() -> KeyValueStore | None:
    """Return the job's key-value store; None before `jax.distributed.initialize` and after its shutdown."""
    from jax._src import distributed

    client = distributed.global_state.client
    return None if client is None else KeyValueStore(client)


def joined_as() -> tuple[int, int] | None:
    """Return this process's number and how many there are, after `jax.distributed.initialize`; None before it.

    Unlike `jax.process_index`, it does not touch the devices, which settings of a job must precede.
    """
    from jax._src import distributed

    state = distributed.global_state
    return None if state.client is None else (int(state.process_id), int(state.num_processes))


def share_cache_keys_on_cpu() -> bool:
    """Make the compile cache's keys the same on all processes of a CPU job; return whether JAX has the hooks for that.

    JAX 0.10 puts each process's view of the topology into the key, and on CPU that differs between processes. The
    devices' kinds are used instead, as JAX does where a platform has no topology.
    """
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


_anew = threading.local()


@contextmanager
def compiling_anew() -> Iterator[None]:
    """Compile in this thread without reading or writing JAX's compile cache.

    XLA's CPU executables cannot be written again after they were read: what such a file has in it loads, and fails when
    it runs ("Function wrapped_broadcast not found"). The setting that switches the cache off counts only once per
    process.
    """
    from jax._src import compiler

    keyed = compiler._get_cache_key
    if not getattr(keyed, "from_meshmend", False):

        def key_of(*given: Any, **more: Any) -> str | None:
            return None if getattr(_anew, "is_on", False) else keyed(*given, **more)

        key_of.from_meshmend = True  # type: ignore[attr-defined]
        compiler._get_cache_key = key_of
    _anew.is_on = True
    try:
        yield
    finally:
        _anew.is_on = False


def is_tracing() -> bool:
    """Whether JAX is tracing a function: what is jitted now becomes a part of that function's program."""
    from jax._src import core

    return not core.trace_state_clean()


def varying_axes(value: Any) -> frozenset[str]:
    """Return the axes of a `shard_map` over which JAX knows a value to vary; none where it does not keep track."""
    kind = jax.typeof(value)
    # JAX 0.10 calls it manual_axis_type.varying, earlier ones vma.
    axes = kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else getattr(kind, "vma", ())
    return frozenset(axes)
