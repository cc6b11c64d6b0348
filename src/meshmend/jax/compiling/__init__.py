"""Compiling before it is needed: for TPUs that are not here, and for failures that have not happened.

`ahead_of_time` compiles for real TPU topologies on a machine without a TPU. `next_failures` fills the compile cache
with the programs for the next possible failures, while the job runs.
"""

from meshmend.jax.compiling.next_failures import CompileAhead, CompiledTrainStep, compile_train_step

__all__ = ["CompileAhead", "CompiledTrainStep", "compile_train_step"]
