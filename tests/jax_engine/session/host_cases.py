"""Hosts of a job, of which this process is one."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import meshmend.jax as mmj


class Of:
    """A device of this process, as if it were another one's."""

    def __init__(self, device: Any, process_index: int) -> None:
        self.device, self.process_index = device, process_index


def of_hosts(n_devices: int, per_host: int, monkeypatch: pytest.MonkeyPatch) -> list[Of]:
    """Devices of this process that `survivors` takes for those of several hosts."""

    def discover(used: list[Of], **facts: Any) -> mmj.Fabric:
        return mmj.discover([one.device for one in used], **facts)

    monkeypatch.setattr("meshmend.jax.session.survivors.discover", discover)
    return [Of(device, i // per_host) for i, device in enumerate(jax.devices()[:n_devices])]
