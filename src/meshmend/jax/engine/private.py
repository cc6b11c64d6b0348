"""All that meshmend uses of JAX beyond its public API. No other module does (`tests/test_architecture.py`).

JAX may move any of this in a minor release: whether it is all there is looked up when this is imported (what only jobs
on CPU devices use, when they do), and `tests/jax_engine/test_private.py` has a test for each that says what breaks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from meshmend.extras import require_names

require_names("jax", ["jax._src.distributed:global_state"], needed_for="meshmend.jax")


class KeyValueStore:
    """The key-value store of JAX's coordination service, which JAX opens in `jax.distributed.initialize`.

    It has no public API. It raises `RuntimeError` where the service cannot be reached.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        """Write a value; a key that has one is an error."""
        self._client.key_value_set_bytes(key, value)

    def wait_for(self, key: str, timeout_s: float) -> bytes | None:
        """Return a value as soon as it is there; None if it is not by then."""
        try:
            return bytes(self._client.blocking_key_value_get_bytes(key, max(1, int(1000 * timeout_s))))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def folder(self, prefix: str) -> list[tuple[str, bytes]]:
        """Return all keys that begin with this and a slash, and their values, without waiting."""
        return [(str(key), bytes(value)) for key, value in self._client.key_value_dir_get_bytes(prefix)]

    def delete(self, prefix: str) -> None:
        """Forget a value, and all those whose keys begin with this; none that is there is no error."""
        self._client.key_value_delete(prefix)


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


def coordinator_address() -> str:
    """Return where the job's coordination service is, after `jax.distributed.initialize`; "" before it."""
    from jax._src import distributed

    return distributed.global_state.coordinator_address or ""


def use_gloo_at(address: str) -> None:
    """Have this process's CPU devices listen for the others at an address of this machine.

    JAX passes Gloo no address, and Gloo takes the one that the machine's name resolves to: on Debian 127.0.1.1, which
    no other machine reaches. Call it after `jax.distributed.initialize`, before anything touches a device. Raises
    `VersionError` where JAX lacks what it takes, and RuntimeError where Gloo cannot listen there.
    """
    names = ["jax._src.xla_bridge:make_cpu_client", "jaxlib:_jax.make_gloo_tcp_collectives"]
    require_names("jax", names, needed_for="Gloo at a given address")
    import jaxlib
    from jax._src import distributed, xla_bridge
    from jax.extend import backend

    client = distributed.global_state.client
    gloo = jaxlib._jax.make_gloo_tcp_collectives(distributed_client=client, hostname=address)
    backend.register_backend_factory("cpu", partial(xla_bridge.make_cpu_client, gloo), priority=0, fail_quietly=False)


def varying_axes(value: Any) -> frozenset[str]:
    """Return the axes of a `shard_map` over which JAX knows a value to vary; none where it does not keep track."""
    return frozenset(jax.typeof(value).manual_axis_type.varying)
