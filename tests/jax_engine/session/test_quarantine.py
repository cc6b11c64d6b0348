"""A session leaves out what is in quarantine: the same on every process, and training goes on round it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.job.job_cases import assert_same_bits, train
from jax_engine.session.host_cases import Of, of_hosts
from meshmend.errors import QuarantineError, RestartError
from meshmend.jax.session import Session, initialize_alone
from meshmend.jax.session.coordination import Coordination
from meshmend.jax.session.survivors import agree_on_quarantine, check_connected, check_part, fabric_of_hosts, leave_out
from meshmend.launch import Hosts, Launch, Timeline
from meshmend.quarantine import Quarantined, QuarantineList, Suspect

HOSTS = Hosts.of("4x4", "2x2")


def listed(*names: str) -> list[Quarantined]:
    return [Quarantined(Suspect.parse(name), "test", "by hand", 0.0, 1e12) for name in names]


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        QuarantineList(folder).add(Suspect.parse(name), why="test")
    return folder


def whole() -> mmj.Fabric:
    return mmj.discover(jax.devices()[:16], shape="4x4")


def test_chips_and_cables_are_holes_and_their_devices_idle() -> None:
    fabric = leave_out(whole(), listed("1,1", "3,3", "0,0-0,1"), None)
    assert fabric.mesh == mm.Mesh("4x4", failed=["1,1", "3,3"], failed_cables=["0,0-0,1"])
    used = [device for i, device in enumerate(jax.devices()[:16]) if i not in (5, 15)]
    assert fabric.jax_mesh.devices.tolist() == used
    assert leave_out(whole(), listed("host 1"), HOSTS).mesh == mm.Mesh("4x4", failed=["2x2@0,2"])


def test_a_job_without_a_chip_trains_as_one_that_never_had_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for name, failed in (("quarantined", []), ("failed", ["1,1"])):
        folder = tmp_path / name
        monkeypatch.setenv("MESHMEND_MEMORY", str(folder / "memory"))
        if not failed:
            fill(folder, "1,1")
        session = initialize_alone(mmj.discover(jax.devices()[:6], shape="2x3", failed=failed), quarantine=folder)
        assert session.fabric.mesh == mm.Mesh("2x3", failed=["1,1"])
        noted = [event["suspect"] for event in session.timeline.events if event["event"] == "quarantined"]
        assert noted == ([] if failed else ["1,1"])
        results.append(train(mmj.Job(folder, 32, session=session, planner="latency", disk_every=0), 3))
    assert_same_bits(*results)


class Answered(Coordination):
    """One process of several, of which process 0 has given its answer, or raised its error."""

    def __init__(self, process: int, said: list[Any]) -> None:
        super().__init__(process, 1)
        self._said = said

    def decide(self, fact: Any, judge: Callable[[list[Any]], Any]) -> Any:
        if self.process == 0:
            self._said.append(judge([fact]))
        return self._said[0]


def test_process_0_decides_for_all(tmp_path: Path) -> None:
    """The others may see an older list, a damaged one or none: all leave out the same."""
    fill(tmp_path / "0", "1,1", "host 2")
    fill(tmp_path / "1", "3,3")
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "quarantine.json").write_text("{")
    said: list[Any] = []
    found = [agree_on_quarantine(tmp_path / str(process), Answered(process, said))[0] for process in range(4)]
    assert [str(entry.suspect) for entry in found[0]] == ["1,1", "host 2"]
    assert found[0] == found[1] == found[2] == found[3] == QuarantineList(tmp_path / "0").active()


def test_a_damaged_list_is_an_error_of_the_judge_which_all_raise(tmp_path: Path) -> None:
    (tmp_path / "quarantine.json").write_text("{")
    with pytest.raises(QuarantineError, match="is damaged: it is not JSON"):
        agree_on_quarantine(tmp_path, Coordination(0, 1))


def test_without_a_folder_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MESHMEND_SHARED", raising=False)
    assert agree_on_quarantine(None, Coordination(0, 1)) == ((), ())
    monkeypatch.setenv("MESHMEND_SHARED", str(fill(tmp_path, "0,0")))
    assert [str(entry.suspect) for entry in agree_on_quarantine(None, Coordination(0, 1))[0]] == ["0,0"]


def test_what_cannot_be_left_out_says_so() -> None:
    with pytest.raises(QuarantineError, match="There is no chip 4,4 in this machine"):
        leave_out(whole(), listed("4,4"), None)
    with pytest.raises(QuarantineError, match="No cable joins the two chips of 0,0-0,3 in a 4x4 mesh"):
        leave_out(whole(), listed("0,0-0,3"), None)
    with pytest.raises(QuarantineError, match="Quarantine its chips, each by its coordinate"):
        leave_out(whole(), listed("host 1"), None)
    with pytest.raises(QuarantineError, match="There is no host 4: the machine has hosts 0 to 3"):
        leave_out(whole(), listed("host 4"), HOSTS)
    with pytest.raises(RestartError, match="Nothing is left to train on: all chips of Mesh"):
        leave_out(whole(), listed("host 0", "host 1", "host 2", "host 3"), HOSTS)
    with pytest.raises(RestartError, match="form 2 disconnected groups"):
        check_connected(leave_out(whole(), listed("0,1", "1,0"), None), (0,))


@pytest.fixture
def of_four_hosts(monkeypatch: pytest.MonkeyPatch) -> list[Of]:
    return of_hosts(16, 4, monkeypatch)


def test_a_process_may_drive_fewer_chips_than_its_host_has(of_four_hosts: list[Of]) -> None:
    fabric = fabric_of_hosts(HOSTS, [0, 1, 2, 3], of_four_hosts, listed("0,2", "host 0"))
    assert fabric.mesh == mm.Mesh("4x4", failed=["2x2@0,0", "0,2"])
    # Host 1 begins at (0,2), which is left out: its second device is the first of the mesh.
    assert fabric.jax_mesh.devices.flat[0] == of_four_hosts[5].device
    assert fabric.jax_mesh.devices.flat[fabric.mesh.rank((2, 2))] == of_four_hosts[12].device


def test_a_process_without_a_chip_is_named() -> None:
    fabric = leave_out(whole(), listed("0,0"), None)
    check_part(fabric, (0,), 1)
    with pytest.raises(RestartError, match="All chips of host 5 are in quarantine, so it has no part") as caught:
        check_part(fabric, (0, 5), 1)
    assert caught.value.host == 5


def test_the_next_losses_leave_it_out_too(of_four_hosts: list[Of], monkeypatch: pytest.MonkeyPatch) -> None:
    entries = tuple(listed("0,2", "2,1-3,1"))
    session = Session(
        fabric_of_hosts(HOSTS, [0, 1, 2, 3], of_four_hosts, entries),
        Launch("127.0.0.1:1", 4, 0),
        HOSTS,
        (0, 1, 2, 3),
        Coordination(0, 1),
        Timeline(None),
        quarantined=entries,
    )
    monkeypatch.setattr(jax, "devices", lambda: of_four_hosts)
    ahead = {lost: fabric.mesh for lost, fabric in session.fabrics_ahead()}
    expected = {lost: mm.Mesh("4x4", failed=[HOSTS.tiles[lost], "0,2"], failed_cables=["2,1-3,1"]) for lost in range(4)}
    assert ahead == {lost: mesh for lost, mesh in expected.items() if mesh.is_connected}
    assert len(ahead) == 4
