"""What meshmend uses of JAX that is not public: each fails here, with what breaks, when JAX moves it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshmend.jax.private import (
    KeyValueStore,
    compiling_anew,
    is_tracing,
    joined_as,
    key_value_store,
    share_cache_keys_on_cpu,
    varying_axes,
)
from meshmend.launch.processes import free_port

NO_STORE = (
    "JAX's coordination service has moved or speaks otherwise: processes of a restarting job cannot tell each other "
    "what they hold (meshmend.jax.job.coordination). Change KeyValueStore in meshmend/jax/private.py."
)
NO_KEYS = (
    "JAX makes the keys of its compile cache otherwise: on CPU, all processes but the first compile anew after a "
    "restart (meshmend.jax.job.compile_cache). Change share_cache_keys_on_cpu in meshmend/jax/private.py."
)
NO_CACHE = (
    "JAX looks into its compile cache all the same: what a CPU job saves of its programs would fail when it runs "
    "(meshmend.jax.compiling.saved). Change compiling_anew in meshmend/jax/private.py."
)
NO_TRACING = (
    "JAX does not say any more whether it is tracing: Fabric.jit would give compiler options to a part of a jitted "
    "function, which JAX refuses. Change is_tracing in meshmend/jax/private.py."
)
NO_AXES = (
    "JAX keeps track of varying values otherwise: all_reduce under check_vma=True would count gradients twice that JAX "
    "has summed itself, without an error. Change varying_axes in meshmend/jax/private.py."
)


@pytest.fixture
def state() -> Iterator[Any]:
    """A real coordination service with one process, beside JAX's own state."""
    try:
        from jax._src import distributed

        state = distributed.State()
        state.initialize(f"127.0.0.1:{free_port()}", num_processes=1, process_id=0)
        assert state.client is not None
    except (ImportError, AttributeError, TypeError) as error:
        pytest.fail(f"{NO_STORE} ({error})")
    yield state
    state.shutdown()


@pytest.fixture
def store(state: Any) -> KeyValueStore:
    return KeyValueStore(state.client)


def test_a_process_knows_its_number_without_touching_devices(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined_as() is None, NO_STORE
    monkeypatch.setattr("jax._src.distributed.global_state", state)
    assert joined_as() == (0, 1), NO_STORE


def test_the_coordination_service_keeps_values(store: KeyValueStore) -> None:
    store.set("here", "one")
    assert (store.get("here"), store.wait_for("here", 0.05)) == ("one", "one"), NO_STORE
    with pytest.raises(RuntimeError, match="ALREADY_EXISTS"):
        store.set("here", "two")
    store.set("here", "two", overwrite=True)
    assert store.get("here") == "two", NO_STORE
    store.delete("here")
    store.delete("here")
    assert store.get("here") is None, NO_STORE


def test_a_value_that_is_not_there_is_no_error(store: KeyValueStore) -> None:
    """By the texts of two errors: DEADLINE_EXCEEDED and NOT_FOUND."""
    try:
        found = store.get("nowhere"), store.wait_for("nowhere", 0.05)
    except RuntimeError as error:
        pytest.fail(f"{NO_STORE} ({error})")
    assert found == (None, None), NO_STORE


def test_a_service_that_is_gone_is_an_error() -> None:
    class Gone:
        def key_value_try_get(self, key: str) -> str:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

        def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
            return self.key_value_try_get(key)

    store = KeyValueStore(Gone())
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        store.get("key")
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        store.wait_for("key", 0.01)


def test_jaxs_own_client_is_found_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_value_store() is None
    try:
        monkeypatch.setattr("jax._src.distributed.global_state.client", "a client")
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{NO_STORE} ({error})")
    assert key_value_store() is not None, NO_STORE


def test_a_thread_can_compile_without_the_compile_cache(tmp_path: Path) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        with compiling_anew():
            assert jax.jit(lambda x: 3 * x).lower(1.0).compile()(2.0) == 6
        assert not list(tmp_path.iterdir()), NO_CACHE
        jax.jit(lambda x: 4 * x).lower(1.0).compile()
        assert list(tmp_path.iterdir()), "the oracle: afterwards it is written to"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_keys_of_the_compile_cache_are_those_of_the_devices_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        from jax._src import cache_key

        by_topology, by_kind = cache_key._hash_accelerator_config, cache_key._hash_devices
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{NO_KEYS} ({error})")
    monkeypatch.setattr(cache_key, "_hash_accelerator_config", by_topology)  # puts it back in the end
    assert share_cache_keys_on_cpu(), NO_KEYS
    assert share_cache_keys_on_cpu(), "a second time, too"
    devices = np.array(jax.devices()[:4])

    def digest(hash_devices: Any) -> str:
        found = hashlib.sha256()
        hash_devices(found, devices)
        return found.hexdigest()

    assert digest(cache_key._hash_accelerator_config) == digest(by_kind), NO_KEYS
    key = cache_key.get  # what the persistent cache asks: it must go through the function that was replaced
    assert "_hash_accelerator_config" in key.__code__.co_names + tuple(
        name for const in key.__code__.co_consts if hasattr(const, "co_names") for name in const.co_names
    ), NO_KEYS


@pytest.mark.parametrize(("check_vma", "expected"), [(True, [{"chip"}, set()]), (False, [set(), set()])])
def test_axes_over_which_a_value_varies(check_vma: bool, expected: list[set[str]]) -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("chip",))
    found = []

    def local(split: Any, same: Any) -> Any:
        found.extend([set(varying_axes(split)), set(varying_axes(same))])
        return split

    by_chip = PartitionSpec("chip")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(by_chip, PartitionSpec()), out_specs=by_chip, check_vma=check_vma
    )
    jax.eval_shape(mapped, np.zeros(2, np.float32), np.zeros(3, np.float32))
    assert found == expected, NO_AXES


def test_whether_a_function_is_being_traced() -> None:
    def says(_: Any) -> Any:
        return np.float32(is_tracing())

    assert says(0) == 0, NO_TRACING
    assert jax.jit(says)(0) == 1, NO_TRACING
    assert says(0) == 0, NO_TRACING
