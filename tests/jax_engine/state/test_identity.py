"""A state is restored only as what it was: every path, shape, dtype and optimizer type counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.restart_cases import Started, assert_is_step
from meshmend.errors import RestartError
from meshmend.jax.state.candidates import check_agreement
from meshmend.jax.state.layout.state_layout import StateLayout
from meshmend.jax.state.layout.tree_signature import Identity

F32 = np.float32


def identity_of(params: Any, optimizer: optax.GradientTransformation) -> Identity:
    return Identity.of({"params": params, "opt_state": optimizer.init(params)})


BASE = {"in": np.zeros((3, 4), F32), "out": np.zeros((4, 2), F32)}
# Each has as many elements of each dtype as BASE with Adam, in the same number of arrays.
OTHERS = {
    "shapes": (
        {"in": np.zeros((2, 4), F32), "out": np.zeros((4, 3), F32)},
        optax.adam(0.1),
        r"params\['in'\].*3,4.*2,4",
    ),
    "transposed": ({"in": np.zeros((4, 3), F32), "out": np.zeros((4, 2), F32)}, optax.adam(0.1), r"3,4.*4,3"),
    "renamed": (
        {"in": np.zeros((3, 4), F32), "up": np.zeros((4, 2), F32)},
        optax.adam(0.1),
        r"params\['out'\]: expected",
    ),
    "dtype": ({"in": np.zeros((3, 4), np.int32), "out": np.zeros((4, 2), F32)}, optax.adam(0.1), "float32.*int32"),
    "list": ([np.zeros((3, 4), F32), np.zeros((4, 2), F32)], optax.adam(0.1), "params: expected dict, got list"),
    "optimizer": (BASE, optax.lion(0.1), r"opt_state\[0\]: expected ScaleByAdamState, got ScaleByLionState"),
    "stateless": (
        BASE,
        optax.chain(optax.adam(0.1), optax.clip(1.0)),
        r"state\[0\]: expected ScaleByAdamState, got tuple",
    ),
    "scheduled": (BASE, optax.adam(optax.constant_schedule(0.1)), r"state\[1\]: expected EmptyState, got ScaleBySch"),
}


def sharded_identity(shape: tuple[int, ...], n_chips: int = 4, **options: Any) -> Identity:
    """Of a stack of layers, and of Adam's state for it; nothing is computed."""
    fabric = mmj.discover(jax.devices()[:n_chips], shape=(2, n_chips // 2))
    pair = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric, update="two-phase")
    tree = {"w": np.zeros(shape, F32)}
    params = jax.eval_shape(lambda: mmj.fsdp.shard_params(tree, fabric, pair, stacked=True, **options))
    training = mmj.fsdp.sharded_train_step(lambda *_: 0.0, optax.adam(0.1), fabric)
    return StateLayout.of(training, pair, params).identity


def test_sharded_parameters_are_known_by_the_arrays_that_they_are_shards_of() -> None:
    mine = sharded_identity((3, 4, 5))
    assert mine.difference(sharded_identity((3, 4, 5), n_chips=6)) == ""
    assert mine.difference(sharded_identity((3, 4, 5), gather_dtype=jnp.bfloat16)) == ""
    transposed, fewer = sharded_identity((3, 5, 4)), sharded_identity((1, 12, 5))
    expected = "params['w']: expected float32[3,4,5], got "
    assert mine.difference(transposed) == expected + "float32[3,5,4]"
    assert mine.difference(fewer) == expected + "float32[1,12,5]"


TURNED = {"in": np.zeros((4, 3), F32), "out": np.zeros(8, F32)}
RENAMED = {"in": np.zeros((3, 4), F32), "body": np.zeros(8, F32)}


@pytest.mark.parametrize("name", OTHERS)
def test_the_first_difference_is_named(name: str) -> None:
    params, optimizer, message = OTHERS[name]
    mine, other = identity_of(BASE, optax.adam(0.1)), identity_of(params, optimizer)
    assert re.search(message, mine.difference(other))
    assert other.difference(mine)
    assert mine.digest != other.digest


def test_equal_states_have_one_identity_whatever_their_values() -> None:
    mine = identity_of(BASE, optax.adam(0.1))
    other = identity_of(jax.tree.map(np.ones_like, BASE), optax.adam(3.0))
    assert mine == other
    assert mine.difference(other) == ""
    assert mine.digest == other.digest
    again = Identity.from_json(json.loads(json.dumps(mine.as_json())))
    assert again == mine
    assert again.digest == mine.digest


def test_order_and_what_is_missing_count() -> None:
    mine = Identity((("a", "x"), ("b", "y")))
    assert mine.difference(Identity((("b", "y"), ("a", "x")))) == "the same paths in another order"
    assert mine.difference(Identity((("a", "x"),))) == "b: expected y, got nothing of that path"
    assert Identity((("a", "x"),)).difference(mine) == "b: expected nothing of that path, got y"


@pytest.mark.parametrize("facts", [None, {}, [1], [["a"]], [["a", 2]], [["a", "b", "c"]], "ab"])
def test_what_is_no_identity_is_refused(facts: Any) -> None:
    with pytest.raises(RestartError, match="pairs of path and type"):
        Identity.from_json(facts)


@pytest.mark.parametrize(
    ("weights", "optimizer", "where", "sharded", "message"),
    [
        (TURNED, None, "memory", True, r"\['in'\]: expected float32\[4,3\], got float32\[3,4\]"),
        (TURNED, None, "disk", False, r"\['in'\]: expected float32\[4,3\], got float32\[3,4\]"),
        (RENAMED, None, "memory", False, r"params\['body'\]: expected float32\[8\], got nothing"),
        (None, optax.lion(0.1), "disk", True, "expected ScaleByLionState, got ScaleByAdamState"),
    ],
    ids=["shapes in memory", "shapes on disk", "renamed in memory", "optimizer on disk"],
)
def test_another_models_state_is_refused(
    weights: Any, optimizer: Any, where: str, sharded: bool, message: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"memory": tmp_path / "memory"}
    if where == "disk":
        options = {"memory_every": 0, "disk": tmp_path / "disk", "disk_every": 1}
    job = Started(sharded=sharded, **options)
    job.restore()
    job.keep(7)
    job.keeper.close()
    with pytest.raises(RestartError, match=message) as error:
        Started(weights, optimizer, sharded=sharded, **options).restore()
    assert error.value.step == 7
    assert "MESHMEND_JOB" in str(error.value)
    again = Started(sharded=sharded, **options)
    assert_is_step(again, again.restore(), 7)


def test_processes_of_different_models_do_not_start() -> None:
    with pytest.raises(RestartError, match="different models"):
        check_agreement([{"identity": "a"}, {"identity": "b"}])
    check_agreement([{"identity": "a"}, {"identity": "a"}])
