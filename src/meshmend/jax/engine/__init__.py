"""Run a schedule on the devices of a mesh with holes, inside `jax.shard_map`.

`fabric` finds the hole, `program` makes a schedule ready to run, and `loops` and `collectives` run it on pytrees.
Beside them are fabrics of `tiles`, what `measure` learns of the devices, and `private`: all that is used of JAX beyond
its public API.
"""

__all__: list[str] = []
