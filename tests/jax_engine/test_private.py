"""What meshmend uses of JAX that is not public: each fails here, with what breaks, when JAX moves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_engine.two_processes import run_two
from meshmend.jax.engine.private import (
    KeyValueStore,
    coordinator_address,
    joined_as,
    key_value_store,
    varying_axes,
)
from meshmend.launch.processes import free_port

NO_STORE = (
    "JAX's coordination service has moved or speaks otherwise: processes of a restarting job cannot tell each other "
    "what they hold (meshmend.jax.session.coordination). Change KeyValueStore in meshmend/jax/engine/private.py."
)
NO_GLOO = (
    "JAX makes its CPU devices otherwise: Gloo would listen where the machine's name resolves to, which on Debian no "
    "other machine reaches. Change use_gloo_at in meshmend/jax/engine/private.py."
)
NO_AXES = (
    "JAX keeps track of varying values otherwise: all_reduce under check_vma=True would count gradients twice that JAX "
    "has summed itself, without an error. Change varying_axes in meshmend/jax/engine/private.py."
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
    assert coordinator_address() == "", NO_STORE
    monkeypatch.setattr("jax._src.distributed.global_state", state)
    assert joined_as() == (0, 1), NO_STORE
    assert coordinator_address() == state.coordinator_address, NO_STORE


def test_gloo_listens_at_the_address_that_it_is_given() -> None:
    """By the kernel's own list of sockets. Once the devices are there it is too late, which is an error."""
    told = run_two("jax_engine.gloo_addresses", timeout_s=120)
    assert [one["listens"] for one in told] == [["127.0.0.2"], ["127.0.0.3"]], NO_GLOO
    assert [one["sum"] for one in told] == [16.0, 16.0], NO_GLOO
    assert all("already initialized" in one["again"] for one in told), NO_GLOO


def test_the_coordination_service_keeps_values(store: KeyValueStore) -> None:
    store.set("here/1/a", b"one")
    assert store.wait_for("here/1/a", 0.05) == b"one", NO_STORE
    with pytest.raises(RuntimeError, match="ALREADY_EXISTS"):
        store.set("here/1/a", b"two")
    store.set("here/10/a", b"ten")
    assert store.folder("here/1/") == [("here/1/a", b"one")], NO_STORE
    store.delete("here/1/")
    store.delete("here/1/")
    assert store.folder("here/1/") == [], NO_STORE
    assert store.wait_for("here/1/a", 0.05) is None, NO_STORE
    assert store.wait_for("here/10/a", 0.05) == b"ten", NO_STORE


def test_a_value_that_is_not_there_is_no_error(store: KeyValueStore) -> None:
    """By the text of an error: DEADLINE_EXCEEDED."""
    try:
        found = store.wait_for("nowhere", 0.05)
    except RuntimeError as error:
        pytest.fail(f"{NO_STORE} ({error})")
    assert found is None, NO_STORE


def test_a_service_that_is_gone_is_an_error() -> None:
    class Gone:
        def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        KeyValueStore(Gone()).wait_for("key", 0.01)


def test_jaxs_own_client_is_found_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_value_store() is None
    try:
        monkeypatch.setattr("jax._src.distributed.global_state.client", "a client")
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{NO_STORE} ({error})")
    assert key_value_store() is not None, NO_STORE


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
