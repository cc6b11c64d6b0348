"""Plans for engines that are not meshmend's: a folder that JAX alone runs, and an op for torch_tpu.

`exporting` needs JAX and `torch_tpu` needs torch, so both are imported by name.
"""

from meshmend_lab.export.artefact import Artefact, read_artefact

__all__ = ["Artefact", "read_artefact"]
