"""An ordinary Flax NNX transformer with sharding annotations, and its batches: what both NNX scripts here train."""

from __future__ import annotations

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, WIDTH, HIDDEN, HEADS, LAYERS, LENGTH, BATCH = 64, 16, 32, 4, 1, 8, 240


def split(*names):
    """Return an initializer whose result is split by these axes of the mesh."""
    return nnx.with_partitioning(nnx.initializers.normal(0.02), names)


class Block(nnx.Module):
    """Attention and a dense pair, split by heads and by hidden units."""

    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, kernel_init=split(None, "model"), rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, kernel_init=split("model", None), rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, kernel_init=split(None, "model"), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, kernel_init=split("model", None), rngs=rngs)

    def __call__(self, x):
        """Return the block's output."""
        q, k, v = jnp.split(self.qkv(self.norm1(x)).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Predicts the next token."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=split("model", None), rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        """Return the logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def loss(model, tokens):
    """Return the mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batches(steps):
    """Yield sequences that count upwards from random starts: something to learn."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        yield (rng.integers(0, VOCAB, (BATCH, 1)) + np.arange(LENGTH + 1)).astype(np.int32) % VOCAB
