"""One train step over a fabric, for any loss and optax optimizer: plan, gradients, their all-reduce, and the update.

`step` puts it together for whole parameters and `fsdp` for sharded ones; `plan` chooses what it runs, and the
`optimizer_…` files say which optimizers may update shards.
"""

__all__: list[str] = []
