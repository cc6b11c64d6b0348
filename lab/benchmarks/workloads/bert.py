"""BERT-large pre-training: masked words and next sentences (Devlin et al., 2018), bfloat16 activations."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

LAYERS, WIDTH, HEADS, INNER = 24, 1024, 16, 4096
VOCABULARY, POSITIONS, SEGMENTS = 30522, 512, 2
LENGTH, MASKED = 512, 76
"""Words of a sequence, and how many of them are masked, as in MLPerf."""

_Dense = partial(nn.Dense, dtype=jnp.bfloat16, kernel_init=nn.initializers.truncated_normal(0.02))
_Norm = partial(nn.LayerNorm, epsilon=1e-12, dtype=jnp.float32)


class Layer(nn.Module):
    """Attention and a wide dense pair, each added to what came in and then normalised."""

    @nn.compact
    def __call__(self, x: Any, visible: Any) -> Any:
        """Return the layer's output."""
        attend = nn.MultiHeadDotProductAttention(
            HEADS, dtype=jnp.bfloat16, kernel_init=nn.initializers.truncated_normal(0.02)
        )
        x = _Norm()(x + attend(x, mask=visible)).astype(jnp.bfloat16)
        y = _Dense(WIDTH)(nn.gelu(_Dense(INNER)(x), approximate=True))
        return _Norm()(x + y).astype(jnp.bfloat16)


class Bert(nn.Module):
    """BERT-large with its two pre-training heads; the readout of words shares the embedding's weights."""

    @nn.compact
    def __call__(self, batch: Any) -> tuple[Any, Any]:
        """Return logits of the masked words and of "is the next sentence", in float32."""
        embed = partial(nn.Embed, features=WIDTH, embedding_init=nn.initializers.truncated_normal(0.02))
        words = embed(VOCABULARY, name="words")
        x = words(batch["words"]) + embed(POSITIONS, name="positions")(jnp.arange(LENGTH))
        x = _Norm()(x + embed(SEGMENTS, name="segments")(batch["segments"])).astype(jnp.bfloat16)
        visible = nn.make_attention_mask(batch["present"], batch["present"], dtype=jnp.bool_)
        for _ in range(LAYERS):
            x = Layer()(x, visible)
        pooled = jnp.tanh(_Dense(WIDTH, name="pooler")(x[:, 0]))
        chosen = jnp.take_along_axis(x, batch["masked_at"][:, :, None], axis=1)
        chosen = _Norm()(nn.gelu(_Dense(WIDTH, name="masked")(chosen), approximate=True)).astype(jnp.bfloat16)
        bias = self.param("bias", nn.initializers.zeros, (VOCABULARY,))
        logits = chosen @ words.embedding.astype(jnp.bfloat16).T + bias
        return logits.astype(jnp.float32), _Dense(2, name="next")(pooled).astype(jnp.float32)


def example(batch: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    sequence, masked = ((batch, n) for n in (LENGTH, MASKED))
    shapes = {
        "words": sequence,
        "segments": sequence,
        "present": sequence,
        "masked_at": masked,
        "masked_words": masked,
        "masked_weights": masked,
        "next": (batch,),
    }
    kinds = {"masked_weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct(shape, kinds.get(name, jnp.int32)) for name, shape in shapes.items()}


def init(batch: Any) -> Any:
    """Return the model's variables: its weights."""
    return Bert().init(jax.random.key(0), batch)


def loss(params: Any, statistics: Any, batch: Any) -> tuple[Any, Any]:
    """Return the sum of the two heads' cross-entropies; there are no running statistics."""
    logits: Any = Bert().apply({"params": params}, batch)
    words, following = logits
    by_word = jnp.take_along_axis(nn.log_softmax(words), batch["masked_words"][:, :, None], axis=-1)[:, :, 0]
    weights = batch["masked_weights"]
    masked = -jnp.sum(weights * by_word) / (jnp.sum(weights) + 1e-5)
    by_pair = jnp.take_along_axis(nn.log_softmax(following), batch["next"][:, None], axis=-1)
    return masked - jnp.mean(by_pair), statistics
