"""The schedule, and everything that defines it: what it is, what proves it, its file format, its equivalent forms.

`schedule` is the representation itself, `columns` its arrays. `verify` says what each collective is and proves that a
schedule is one. `serialize` reads and writes files, and `split` cuts an all-reduce into its reduce-scatter and its
all-gather.
"""

from meshmend.schedule.collective import Collective, Op
from meshmend.schedule.columns import MAX_CHUNKS
from meshmend.schedule.schedule import MAX_EXPANDED, MAX_PHASES, Phase, Schedule

__all__ = ["MAX_CHUNKS", "MAX_EXPANDED", "MAX_PHASES", "Collective", "Op", "Phase", "Schedule"]
