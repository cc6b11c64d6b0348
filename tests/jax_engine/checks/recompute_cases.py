"""A small model whose gradients are wrong on chosen chips, in chosen bits, as often as wanted: one compiled program.

As a script, this is one of two processes with eight devices each that check gradients together; run by test_recompute.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from scipy.stats import binom

import meshmend.jax as mmj
from meshmend.jax.checks.recompute import Recompute
from meshmend.jax.data.example_keys import RandomKey
from meshmend.jax.job.model import Model
from meshmend.jax.session.coordination import Coordination

N_SAMPLES, LAST, WIDTH = 30_000, 106, 3
"""Samples of an epoch, and how many of them are left at the start. (grain shuffles a short epoch slowly.)"""
_rng = np.random.default_rng(5)
DATA: dict[str, Any] = {"x": _rng.normal(size=(N_SAMPLES, WIDTH)).astype(np.float32), "y": np.arange(N_SAMPLES)}
PARAMS: dict[str, Any] = {
    "w": _rng.normal(size=(WIDTH, 2)).astype(np.float32),
    "half": _rng.normal(size=5).astype(jnp.bfloat16),
}
WORDS = {"w": jnp.uint32, "half": jnp.uint16}


def fabric_of(shape: str = "4x4", failed: Sequence[str] = ("2x2@0,0",)) -> mmj.Fabric:
    size = int(np.prod([int(n) for n in shape.split("x")]))
    return mmj.discover(jax.devices()[:size], shape=shape, failed=list(failed))


def fault(n_chips: int, chips: Sequence[int] = (), bits: Sequence[int] = (), **more: Any) -> dict[str, Any]:
    """What is wrong, as a model state: `chips` flip one bit each of an element of a leaf's gradient.

    A chip does so with probability `p`, independently for each part: drawn from `seed`, the chip and the part.
    """
    mask, which = np.zeros(n_chips, bool), np.zeros(n_chips, np.uint32)
    for chip, bit in zip(chips, bits, strict=True):
        mask[chip], which[chip] = True, bit
    plain = {"leaf": 1, "element": 0, "p": 1.0, "seed": 0} | more
    return {"chips": mask, "bits": which} | {
        name: np.asarray(value).astype(f"{np.asarray(value).dtype.kind}4") for name, value in plain.items()
    }


@jax.custom_vjp
def struck(params: Any, faulty: Any, part: Any) -> Any:
    """Return the parameters; their gradients are those of a faulty chip."""
    del faulty, part
    return params


def _forward(params: Any, faulty: Any, part: Any) -> Any:
    return params, (faulty, part)


def _backward(kept: Any, gradients: Any) -> Any:
    faulty, part = kept
    chip = lax.axis_index("chip")
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(faulty["seed"]), chip), part)
    is_wrong = faulty["chips"][chip] & jax.random.bernoulli(key, faulty["p"])

    def flip(number: int, name: str, leaf: Any) -> Any:
        word = WORDS[name]
        bits = lax.bitcast_convert_type(leaf, word).reshape(-1)
        changed = bits[faulty["element"]] ^ (jnp.ones((), word) << faulty["bits"][chip].astype(word))
        flipped = jnp.where(is_wrong & (faulty["leaf"] == number), bits.at[faulty["element"]].set(changed), bits)
        return lax.bitcast_convert_type(flipped, leaf.dtype).reshape(leaf.shape)

    return {name: flip(i, name, leaf) for i, (name, leaf) in enumerate(gradients.items())}, None, None


struck.defvjp(_forward, _backward)


def loss(params: Any, state: Any, batch: Any, keys: Any) -> Any:
    """One value per example, with noise from its key; the state stays as it is."""
    # The first place of a part stands for it: no two parts of a step have the same.
    first = jax.random.key_data(keys)[0].sum().astype(jnp.int32)
    params = struck(params, state, first)
    noise = jax.vmap(lambda key: jax.random.normal(key, (2,)))(keys)
    out = jnp.tanh(batch["x"] @ params["w"]) + 0.1 * noise
    values = (out.sum(axis=1) * params["half"].astype(jnp.float32).sum() - batch["y"]) ** 2
    return values, jax.tree.map(lambda x: jnp.broadcast_to(x, (len(keys), *jnp.shape(x))), state)


def simple(params: Any, state: Any, part: Any) -> Any:
    """Gradients that compile quickly, with 1 added on faulty chips."""
    del params
    return part.weights @ part.data["x"] + jnp.where(state["chips"][lax.axis_index("chip")], 1.0, 0.0)


class Bench:
    """A fabric, its model and feed, and checks of one step after the other."""

    def __init__(self, fabric: mmj.Fabric, gradients: Any = None, data: Any = None, **options: Any) -> None:
        self.fabric = fabric
        self.n_chips = fabric.mesh.n_chips
        model = Model(loss, optax.sgd(0.1), PARAMS, fault(self.n_chips), RandomKey.of(7))
        given = {"exchange": lambda fact: [fact], "every": 1, **options}
        self.recompute = Recompute(gradients or model.gradients, fabric, **given)
        self.params = jax.device_put(PARAMS, fabric.sharding())
        source = [{"x": x, "y": y} for x, y in zip(DATA["x"], DATA["y"], strict=True)] if data is None else data
        self.feed = mmj.Feed(source, mmj.KeepGlobal(4 * self.n_chips), threads=0, prefetch=0)
        start = mmj.Position(0, N_SAMPLES - LAST) if data is None else None
        self.batches = self.feed.batches(fabric, at=start)
        self.step = count(1)

    def check(self, faulty: Any = None, params: Any = None) -> Any:
        """Check the next step, with or without a fault."""
        state = fault(self.n_chips) if faulty is None else faulty
        state = jax.device_put(state, self.fabric.sharding())
        given = self.params if params is None else params
        return self.recompute.check(next(self.step), given, state, next(self.batches))


def named(observations: Any) -> list[list[str]]:
    """The suspects of each observation."""
    return [[str(suspect) for suspect in observation.suspects] for observation in observations]


def chip_name(fabric: mmj.Fabric, rank: int) -> str:
    return ",".join(map(str, fabric.mesh.chip(rank)))


def with_copy(array: Any, device: int, change: Callable[[Any], Any]) -> jax.Array:
    """Return a replicated array of which one device holds something else, as memory that has flipped would."""
    shards = [shard.data for shard in array.addressable_shards]
    shards[device] = jax.device_put(change(shards[device]), shards[device].sharding)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def binomial_tail(n: int, k: int, q: float) -> float:
    """The smaller of P(X ≤ k) and P(X ≥ k) for X of the binomial distribution."""
    return float(min(binom.cdf(k, n, q), binom.sf(k - 1, n, q)))


def several_checks(bench: Bench) -> list[str]:
    """The observations of clean checks and of checks with liars, over the end of an epoch, as text."""
    faults = [None, None, fault(12, [1], [3]), fault(12, [10], [31]), fault(12, [0, 11], [5, 6]), None]
    return [observation.to_json() for faulty in faults for observation in bench.check(faulty)]


if __name__ == "__main__":
    jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
    # Each host is a 4×2 tile, so that the ranks of its chips are not contiguous.
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    tiles = [(row, 2 * host + column) for host in (0, 1) for row in range(4) for column in (0, 1)]
    holed = mmj.discover(devices, coords=tiles, shape="4x4", failed=["2x2@0,0"])
    coordination = Coordination(int(sys.argv[2]), 2)
    sys.stdout.write(json.dumps(several_checks(Bench(holed, exchange=coordination.exchange))) + "\n")


def by_hand(array: np.ndarray[Any, Any], piece: int) -> list[int]:
    """Return the digests of an array's pieces, by Python's integers: one word per element up to 32 bits, or several."""
    size = array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1)
    words = [int(word) for word in array.ravel().view(f"u{min(size, 4)}")]
    if array.dtype.kind == "i" and size < 4:
        words = [int(value) % 2**32 for value in array.ravel()]
    per_element = len(words) // array.size
    found = []
    for start in range(0, len(words), piece * per_element):
        total = 0
        for place, word in list(enumerate(words))[start : start + piece * per_element]:
            mixed = (word + place * 0x9E3779B9) % 2**32
            mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B % 2**32
            mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
            total += mixed ^ mixed >> 16
        found.append(total % 2**32)
    return found
