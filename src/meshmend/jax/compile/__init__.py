"""Compile before it is needed: for TPUs that are not here, and for failures that have not happened.

`for_topology` compiles for real TPU topologies on a machine without a TPU. `for_failures` compiles for the next
possible failures while the job runs, and `saved` keeps what was compiled, so that a restart loads it.
"""

from meshmend.jax.compile.for_failures import CompileAhead, CompiledTrainStep, compile_train_step
from meshmend.jax.compile.saved import SavedSteps

__all__ = ["CompileAhead", "CompiledTrainStep", "SavedSteps", "compile_train_step"]
