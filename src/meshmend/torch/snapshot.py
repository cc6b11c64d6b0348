"""A copy of a chip's state to go back to: tensors in host memory, detached from whatever goes on with the state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

StateFns = Mapping[str, tuple[Callable[[Any], object], Callable[[], Any]]]
"""How to load and to save the state of each part, as torchft's manager has them."""


@dataclass(frozen=True)
class Snapshot:
    """The state of all parts after a step, and torchft's own."""

    torchft: dict[str, int]
    parts: dict[str, Any]

    @property
    def step(self) -> int:
        """The step after which it was taken."""
        return self.torchft["step"]

    @classmethod
    def take(cls, torchft: Mapping[str, int], parts: StateFns) -> Snapshot:
        """Return a copy of the state as it is now."""
        return cls(dict(torchft), {name: copied(save()) for name, (_, save) in parts.items()})

    def put_back(self, parts: StateFns) -> None:
        """Load it into all parts. They get a copy: an optimizer goes on with the very tensors that it loads."""
        for name, (load, _) in parts.items():
            load(copied(self.parts[name]))


def copied(state: Any) -> Any:
    """Return a deep copy of a state, with its tensors on the CPU.

    >>> weights = {"w": torch.ones(2), "step": [3]}
    >>> kept = copied(weights)
    >>> weights["w"].zero_(), kept["w"].tolist(), kept["step"]
    (tensor([0., 0.]), [1.0, 1.0], [3])
    """
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if type(state) is dict or type(state) is list or type(state) is tuple:
        if isinstance(state, dict):
            return {key: copied(value) for key, value in state.items()}
        return type(state)(map(copied, state))
    if isinstance(state, Mapping):  # of a module, with the version that its loading asks for
        twin = copy.copy(state)
        twin.update({key: copied(value) for key, value in state.items()})  # type: ignore[attr-defined]
        return twin
    return copy.deepcopy(state)
