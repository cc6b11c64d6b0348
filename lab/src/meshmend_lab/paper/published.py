"""The paper's two tables, and what else is needed to compare with them, each number with its source.

"Highly Available Data Parallel ML training on Mesh Networks", S. Kumar and N. Jouppi, 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshmend_lab.availability.assumptions import (
    BERT_OVERHEAD,
    BERT_PARAMETERS,
    BERT_PARAMETERS_SOURCE,
    BERT_STEP_S,
    BERT_STEP_SOURCE,
)

HOLE = "4x2@6,8"
HOLE_SOURCE = "the paper says 4x2, but not where; here away from the edges, on even rows and columns"


@dataclass(frozen=True)
class Case:
    """A row of both tables. Overheads are the fraction of the device's step time that the all-reduce takes."""

    model: str
    shape: str
    chips: int
    chips_holed: int
    minutes: float
    minutes_holed: float
    efficiency: float
    overhead: float
    overhead_holed: float

    @property
    def name(self) -> str:
        """Its name in tables and messages."""
        return f"{self.model}, {self.chips}"

    @property
    def ratio(self) -> float:
        """Ratio of the all-reduce time with the hole to that without, for the same compute time per chip."""
        return self.overhead_holed / (1 - self.overhead_holed) * (1 - self.overhead) / self.overhead


CASES = (
    Case("ResNet-50", "16x32", 512, 504, 1.80, 1.84, 0.99, 0.042, 0.064),
    Case("ResNet-50", "32x32", 1024, 1016, 1.08, 1.15, 0.946, 0.088, 0.11),
    Case("BERT", "16x32", 512, 504, 1.90, 1.92, 1.02, 0.037, 0.047),
    Case("BERT", "32x32", 1024, 1016, 1.16, 1.19, 0.986, BERT_OVERHEAD, 0.078),
)
"""Tables 1 and 2."""


@dataclass(frozen=True)
class PaperWorkload:
    """A model: its gradients, and how long a step took on a full mesh of 1024 chips."""

    model: str
    parameters: float
    parameters_source: str
    step_s: float
    step_source: str


WORKLOADS = {
    "ResNet-50": PaperWorkload(
        "ResNet-50",
        25.6e6,
        "He et al., 2016 (the paper's [12]), with the classifier of 1,000 classes",
        25.2e-3,
        "MLPerf v0.6, Google, tpu-v3-2048 (1024 chips), batch 32,768: 4 epochs, 157 steps, in 3.95 s, with one "
        "evaluation (mlcommons/training_results_v0.6, Google/results/tpu-v3-2048/resnet/result_0.txt)",
    ),
    "BERT": PaperWorkload(
        "BERT",
        BERT_PARAMETERS,
        BERT_PARAMETERS_SOURCE,
        BERT_STEP_S,
        BERT_STEP_SOURCE,
    ),
}

BYTES_PER_GRADIENT = 2
BYTES_SOURCE = (
    "bfloat16, inferred: at 4 bytes BERT's 1.34 GB in the 8.4 ms that table 2 implies would need links of 160 GB/s "
    "under any ring scheme, twice what they have"
)
OTHER_SIZE_SOURCE = (
    "the step on 512 chips is that on 1024 times the ratio of table 1's full-mesh times (same global batch, same "
    "number of steps)"
)
