"""The fabric of the hosts that are there, without what is in quarantine: what is missing is the hole.

A quarantined chip is a hole although its host lives: its device stays unused. Every process must leave out the same
ones, or they would run different programs. So process 0 reads the list, and the others take its answer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax

from meshmend.buckets import Folder
from meshmend.errors import MeshError, QuarantineError, RestartError, name_chip
from meshmend.jax.engine.fabric import Fabric, discover
from meshmend.jax.session.coordination import Coordination
from meshmend.launch.environment import DOMAIN
from meshmend.launch.hosts import Hosts
from meshmend.quarantine import FaultLog, Quarantined, QuarantineList, enforce, untrusted
from meshmend.quarantine.entries import cables_of, chips_of

LONGEST_DOMAIN = 200
"""Characters of a failure domain's name."""
ADVICE = "`meshmend quarantine list DIR` shows why, and `meshmend quarantine clear DIR SUSPECT` takes it back."


def agree_on_quarantine(
    folder: Folder | None, coordination: Coordination, hosts: Hosts | None = None
) -> tuple[tuple[Quarantined, ...], tuple[str, ...]]:
    """Return what is in quarantine, by the list in the folder (by default MESHMEND_SHARED) that process 0 sees.

    What the fault log proves and the list does not have yet is added first: who should have done it may have died. On
    the same occasion, processes tell each other their failure domains, which are returned, too.
    """
    folder = folder or os.environ.get("MESHMEND_SHARED")
    # All processes ask for the devices, or none does: they wait for each other there.
    n_chips = len(jax.devices()) if hosts is None else None

    def judge(words: list[str]) -> dict[str, Any]:
        entries: list[dict[str, Any]] = []
        if folder:
            with _explained():
                enforce(folder, hosts=hosts, n_chips=n_chips)
                entries = [entry.facts() for entry in QuarantineList(folder).active()]
        return {"entries": entries, "domains": words if any(words) else []}

    told = coordination.decide(os.environ.get(DOMAIN, "")[:LONGEST_DOMAIN], judge)
    return tuple(Quarantined.of(facts) for facts in told["entries"]), tuple(told["domains"])


def read_untrusted(folder: Folder) -> list[tuple[int, int]]:
    """Return which states are not to be trusted, by the fault log: see `untrusted`."""
    with _explained():
        return untrusted(FaultLog(folder))


@contextmanager
def _explained() -> Iterator[None]:
    """Raise the error of a disk as one that all processes raise."""
    try:
        yield
    except OSError as error:
        raise QuarantineError(f"{error}"[:2000]) from error


def find_fabric(
    shape: Sequence[int] | str | None,
    hosts: Hosts | None,
    numbers: Sequence[int],
    quarantined: Sequence[Quarantined] = (),
) -> Fabric:
    """Return the fabric of all hosts that are there, without what is in quarantine."""
    devices = jax.devices()
    if hosts is None:
        return leave_out(discover(devices, shape=shape), quarantined, None)
    held = Counter(device.process_index for device in devices)
    hosts.check_devices({number: held[process] for process, number in enumerate(numbers)})
    return fabric_of_hosts(hosts, numbers, devices, quarantined)


def fabric_of_hosts(
    hosts: Hosts, numbers: Sequence[int], devices: Sequence[Any], quarantined: Sequence[Quarantined] = ()
) -> Fabric:
    """Return the fabric in which process i drives the chips of host `numbers[i]`, in the order of its devices."""
    chips = {process: iter(hosts.chips(number)) for process, number in enumerate(numbers)}
    used = [device for device in devices if device.process_index in chips]
    coords = [next(chips[device.process_index]) for device in used]
    # The description says more than the hosts do: slow cables, single chips that have failed, the hardware.
    machine = os.environ.get("MESHMEND_MACHINE")
    if machine is not None:
        fabric = discover(used, machine=machine, coords=coords)
    else:
        fabric = discover(used, shape=hosts.shape, wrap=hosts.wrap if any(hosts.wrap) else None, coords=coords)
    return leave_out(fabric, quarantined, hosts)


def processes_of(devices: Sequence[Any]) -> list[int]:
    """Return the processes that drive devices which report coordinates, as a TPU's do; none where any does not."""
    if any(getattr(device, "coords", None) is None for device in devices):
        return []
    return sorted({int(device.process_index) for device in devices})


def fabric_without(
    lost: Collection[int],
    hosts: Hosts | None,
    numbers: Sequence[int],
    devices: Sequence[Any],
    shape: Sequence[int] | str | None,
    quarantined: Sequence[Quarantined] = (),
) -> Fabric | None:
    """Return what the fabric would be after the loss of some hosts, None where no host is left: see `fabrics_ahead`.

    `lost` has some of the `numbers`, or without `hosts` numbers of processes.
    """
    if hosts is not None:
        left = [number for number in numbers if number not in lost]
        return fabric_of_hosts(hosts, left, devices, quarantined) if left else None
    survivors = [device for device in devices if device.process_index not in lost]
    return leave_out(discover(survivors, shape=shape), quarantined, None) if survivors else None


def share_losses(losses: Sequence[Collection[int]], n_processes: int, *, are_renumbered: bool) -> list[int]:
    """Return for each of the possible losses, given as processes, the one that compiles for it.

    They take turns, and nobody compiles for a loss in which it has no device: the lost ones themselves; or where
    survivors `are_renumbered`, so that the first processes stand in for them, the last ones. Nor does a lost one if
    there is another, because what it has in a folder of its own is lost with it.

    >>> share_losses([[0], [1], [2], [0, 1]], 3, are_renumbered=True)
    [1, 0, 1, 0]
    """
    found = []
    for number, lost in enumerate(losses):
        gone = range(n_processes - len(lost), n_processes) if are_renumbered else lost
        turns = ((number - back) % n_processes for back in range(1, n_processes + 1))
        able = (turn for turn in turns if turn not in gone)
        first = next(able)
        found.append(first if first not in lost else next((one for one in able if one not in lost), first))
    return found


def leave_out(fabric: Fabric, quarantined: Sequence[Quarantined], hosts: Hosts | None) -> Fabric:
    """Return a fabric without the chips and cables that are in quarantine."""
    if not quarantined:
        return fabric
    mesh = fabric.mesh
    for entry in quarantined:
        entry.suspect.check(mesh.shape, None if hosts is None else len(hosts), mesh.wrap)
    try:
        left = mesh.with_failures(chips_of(quarantined, hosts), cables_of(quarantined))
    except MeshError as error:
        raise RestartError(f"Nothing is left to train on: all chips of {mesh!r} are in quarantine. {ADVICE}") from error
    stays = left.live[tuple(mesh.coords.T)]
    jax_mesh = jax.sharding.Mesh(fabric.jax_mesh.devices[stays], fabric.jax_mesh.axis_names)
    return replace(fabric, mesh=left, jax_mesh=jax_mesh)


def check_part(fabric: Fabric, numbers: Sequence[int], n_quarantined: int) -> None:
    """Raise if a process has no chip in the fabric: the same on every process."""
    used = {device.process_index for device in fabric.jax_mesh.devices.flat}
    idle = [host for process, host in enumerate(numbers) if process not in used]
    if idle and n_quarantined:
        raise RestartError(
            f"All chips of host {idle[0]} are in quarantine, so it has no part in the training. Start the job without "
            f"that host, as `meshmend run` does. {ADVICE}",
            host=idle[0],
        )


def check_connected(fabric: Fabric, numbers: Sequence[int]) -> None:
    """Raise if the survivors cannot sum their gradients: the same on every process."""
    mesh = fabric.mesh
    if not mesh.is_connected:
        apart = name_chip(mesh.chip(int((mesh.component_of != mesh.component_of[0]).argmax())))
        raise RestartError(
            f"The survivors (hosts {', '.join(map(str, sorted(numbers)))} of {mesh}) form {mesh.n_components} "
            f"disconnected groups: no cable leads from {name_chip(mesh.chip(0))} to {apart}, so their "
            "gradients cannot be summed. Bring back a host between them, or start the job on one group."
        )
