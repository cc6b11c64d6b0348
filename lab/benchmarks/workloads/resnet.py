"""ResNet-50 as MLPerf trains it: version 1.5, bfloat16 activations, float32 weights (He et al., 2016)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

STAGES = (3, 4, 6, 3)
WIDTH = 64
CLASSES = 1000
IMAGE = 224


class Bottleneck(nn.Module):
    """Three convolutions round a shortcut; the stride sits on the 3×3 one, which is what makes it version 1.5."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Return the block's output."""
        convolve = partial(nn.Conv, use_bias=False, dtype=jnp.bfloat16)
        normalise = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=jnp.bfloat16)
        y = nn.relu(normalise()(convolve(self.width, (1, 1))(x)))
        y = nn.relu(normalise()(convolve(self.width, (3, 3), strides=self.stride)(y)))
        y = normalise(scale_init=nn.initializers.zeros)(convolve(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = normalise()(convolve(4 * self.width, (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """ResNet-50 in training mode: batch statistics are those of the device's own batch."""

    @nn.compact
    def __call__(self, images: Any) -> Any:
        """Return logits, in float32."""
        x = nn.Conv(WIDTH, (7, 7), strides=2, padding=3, use_bias=False, dtype=jnp.bfloat16)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=jnp.bfloat16)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, n_blocks in enumerate(STAGES):
            for block in range(n_blocks):
                x = Bottleneck(WIDTH * 2**stage, stride=2 if stage and not block else 1)(x)
        return nn.Dense(CLASSES, dtype=jnp.float32)(jnp.mean(x, axis=(1, 2)))


def example(batch: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    return {
        "images": jax.ShapeDtypeStruct((batch, IMAGE, IMAGE, 3), jnp.bfloat16),
        "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }


def init(batch: Any) -> Any:
    """Return the model's variables: its weights and its running batch statistics."""
    return ResNet().init(jax.random.key(0), batch["images"])


def loss(params: Any, statistics: Any, batch: Any) -> tuple[Any, Any]:
    """Return the cross-entropy with smoothed labels, and the new running statistics."""
    variables = {"params": params, "batch_stats": statistics}
    logits, new = ResNet().apply(variables, batch["images"], mutable=["batch_stats"])
    targets = nn.one_hot(batch["labels"], CLASSES) * 0.9 + 0.1 / CLASSES
    return -jnp.mean(jnp.sum(targets * nn.log_softmax(logits), axis=-1)), new["batch_stats"]
