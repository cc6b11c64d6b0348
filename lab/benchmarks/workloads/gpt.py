"""A small model like GPT-2 (Radford et al., 2019): the next token, bfloat16 activations, layers recomputed backwards.

Inside a tile it is split as Megatron-LM does (Shoeybi et al., 2019): attention by heads, the dense pair by hidden
units, the embedding by words. Words are looked up by a product with their one-hot vectors, as MaxText can: each chip
multiplies with the words that it has.

It is there to be compiled. Scanned layers are compiled once, whatever their number; but the time of the TPU compiler
grows with the sizes of the arrays, and GPT-2's own would take it minutes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

LAYERS, WIDTH, HEADS, INNER = 12, 256, 8, 1024
VOCABULARY, POSITIONS = 8192, 256


def example(batch: int) -> jax.ShapeDtypeStruct:
    """Return the shape of a batch: one more token than the model reads, as the last is only predicted."""
    return jax.ShapeDtypeStruct((batch, POSITIONS + 1), jnp.int32)


def init(batch: Any) -> Any:
    """Return the model's variables: its weights, those of the layers in one array each."""
    del batch
    shapes = {
        "words": (VOCABULARY, WIDTH),
        "positions": (POSITIONS, WIDTH),
        "layers": {name: (LAYERS, *shape) for name, (shape, _) in _LAYER.items()},
        "norm": (2, WIDTH),
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [0.02 * jax.random.normal(key, shape) for key, shape in zip(keys, leaves, strict=True)]
    return {"params": jax.tree.unflatten(tree, drawn)}


_LAYER: dict[str, tuple[tuple[int, ...], int | None]] = {
    "norm_1": ((2, WIDTH), None),
    "qkv": ((WIDTH, 3, HEADS, WIDTH // HEADS), 2),
    "qkv_bias": ((3, HEADS, WIDTH // HEADS), 1),
    "out": ((HEADS, WIDTH // HEADS, WIDTH), 0),
    "out_bias": ((WIDTH,), None),
    "norm_2": ((2, WIDTH), None),
    "up": ((WIDTH, INNER), 1),
    "up_bias": ((INNER,), 0),
    "down": ((INNER, WIDTH), 0),
    "down_bias": ((WIDTH,), None),
}
"""Shape of each weight of a layer, and the axis that is split inside a tile."""


def split(axes: tuple[str, ...]) -> Any:
    """Return how the weights are split over the axes inside a tile."""

    def by(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, axes)

    layers = {name: by(None if axis is None else axis + 1) for name, (_, axis) in _LAYER.items()}
    return {"words": by(0), "positions": by(None), "layers": layers, "norm": by(None)}


def loss(params: Any, statistics: Any, batch: Any) -> tuple[Any, Any]:
    """Return the mean cross-entropy of the next token; there are no running statistics."""
    read, following = batch[:, :-1], batch[:, 1:]
    words, positions = (params[name].astype(jnp.bfloat16) for name in ("words", "positions"))
    x = jax.nn.one_hot(read, VOCABULARY, dtype=jnp.bfloat16) @ words + positions
    x, _ = lax.scan(jax.checkpoint(_layer), x, params["layers"])
    logits = (_norm(x, params["norm"]) @ words.T).astype(jnp.float32)
    chosen = jnp.sum(logits * jax.nn.one_hot(following, VOCABULARY), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen), statistics


def _layer(x: Any, weights: Any) -> tuple[Any, None]:
    w = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    q, k, v = jnp.einsum("btw,wchd->cbthd", _norm(x, weights["norm_1"]), w["qkv"]) + w["qkv_bias"][:, None, None]
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bthd,hdw->btw", attended, w["out"]) + w["out_bias"]
    hidden = jax.nn.gelu(_norm(x, weights["norm_2"]) @ w["up"] + w["up_bias"])
    return x + hidden @ w["down"] + w["down_bias"], None


def _norm(x: Any, weights: Any) -> Any:
    wide = x.astype(jnp.float32)
    wide = (wide - wide.mean(-1, keepdims=True)) * lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    return (wide * weights[0] + weights[1]).astype(jnp.bfloat16)
