"""Fingerprints: the same for what is made the same way, another one for everything that changes what is computed."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshmend.jax.compile.fingerprint import UnidentifiedError, fingerprint

SOURCE = """
import jax
import jax.numpy as jnp
import numpy as np
RATE, TABLE, NAMES = 0.5, np.arange(3.0), {"b", "a", "c"}

class Layer:
    width = 4
    def __init__(self, scale):
        self.scale = scale
    def __call__(self, w, x):
        return self.scale * self.width * x @ w

def helper(x, power=2):
    return x**power

layer = Layer(3.0)

@jax.jit
def squared(x):
    return helper(x)

def make(closed):
    def loss(w, x):
        each = jax.vmap(lambda row: squared(row) + RATE)
        return each(layer(w, x)) * TABLE.sum() * len(NAMES) + closed["deep"][0]
    return loss

loss = make({"deep": [1.0]})
"""
CHANGES = {
    "a constant inside": ("+ closed", "- closed"),
    "what it closes over": ("[1.0]", "[2.0]"),
    "a global number": ("RATE, TABLE, NAMES = 0.5", "RATE, TABLE, NAMES = 0.25"),
    "an element of an array": ("np.arange(3.0)", "np.arange(3.0) + (np.arange(3) == 2)"),
    "the dtype of an array": ("np.arange(3.0)", "np.arange(3.0, dtype=np.float32)"),
    "an element of a set": ('"c"}', '"d"}'),
    "a default of a helper": ("power=2", "power=3"),
    "the code of a helper": ("x**power", "x*power"),
    "an attribute of an object": ("Layer(3.0)", "Layer(3.5)"),
    "an attribute of a class": ("width = 4", "width = 5"),
    "the code of a method": ("* x @ w", "* (x + 0) @ w"),
    "a lambda inside": ("squared(row) + RATE", "squared(row) - RATE"),
}


def loss_of(source: str) -> Any:
    """Run a script under the name that the interpreter gives to one; return its loss."""
    module = types.ModuleType("__main__")
    exec(compile(source, "train.py", "exec"), vars(module))  # noqa: S102  # the text is above
    return module.loss


def test_the_same_script_has_the_same_fingerprint_wherever_its_lines_are() -> None:
    moved = "# a comment\n\n" + SOURCE.replace("layer = ", "# another\n\nlayer = ")
    assert fingerprint(loss=loss_of(SOURCE)) == fingerprint(loss=loss_of(SOURCE)) == fingerprint(loss=loss_of(moved))


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_loss_changes_the_fingerprint(change: str) -> None:
    before, after = CHANGES[change]
    assert SOURCE.count(before) == 1
    assert fingerprint(loss=loss_of(SOURCE)) != fingerprint(loss=loss_of(SOURCE.replace(before, after)))


OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "adam": optax.adam,
    "lamb": optax.lamb,
    "lars": optax.lars,
    "chain": lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate, momentum=0.9)),
    "schedule": lambda rate: optax.adamw(optax.cosine_decay_schedule(rate, 100)),
    "masked": lambda rate: optax.masked(optax.adam(rate), {"w": True}),
    "inject": lambda rate: optax.inject_hyperparams(optax.adam)(learning_rate=rate),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_is_known_by_its_numbers(make: Callable[[float], Any]) -> None:
    assert fingerprint(of=make(0.1)) == fingerprint(of=make(0.1)) != fingerprint(of=make(0.2))


@dataclass
class Settings:
    width: int
    spec: Any


def test_values_of_every_kind() -> None:
    made: list[Callable[[], Any]] = [
        lambda: Settings(4, P(None, "model")),
        lambda: Settings(4, P("model")),
        lambda: Settings(5, P("model")),
        lambda: jax.random.key(1),
        lambda: jax.random.key(2),
        lambda: jnp.arange(4),
        lambda: np.arange(4),
        lambda: functools.partial(jnp.mean, axis=0),
        lambda: functools.partial(jnp.mean, axis=1),
        lambda: jax.nn.relu,
        lambda: jax.nn.gelu,
        lambda: {"a": 1, "b": 2},
        lambda: {"b": 2, "a": 1},  # dicts are traced in their order, unless JAX sorts them
        lambda: (1, 2),
        lambda: [1, 2],
        lambda: 1,
        lambda: 1.0,
        lambda: True,
        lambda: None,
        lambda: jnp.bfloat16,
        lambda: jax.tree.structure({"a": 1}),
        lambda: jax.tree.structure({"b": 1}),
    ]
    digests = [fingerprint(of=make()) for make in made]
    assert digests == [fingerprint(of=make()) for make in made]
    assert len(set(digests)) == len(made)


def test_cycles_end() -> None:
    def loss(w: Any) -> Any:
        return loss(w)

    ring: list[Any] = []
    ring.append(ring)
    assert fingerprint(of=loss) != fingerprint(of=ring)


def test_what_cannot_be_identified_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(UnidentifiedError, match=r"loss cannot be identified: .*_thread\.lock"):
        fingerprint(loss=lambda _: lock)
    with pytest.raises(UnidentifiedError, match="more than 100000 parts"):
        fingerprint(data=[[number] for number in range(100_000)])
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(UnidentifiedError, match="nested too deeply"):
        fingerprint(data=nested)
