"""Which samples a step uses, whatever chips are left, so that each is used once per epoch.

`feed` makes batches by the `policy` of a job from any source of samples; `exactly_once` checks a job's timelines.
"""

__all__: list[str] = []
