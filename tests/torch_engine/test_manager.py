"""What a chip under torchft writes down, alone in its quorum: every kind of event, and the account of them."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchft")

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer

import meshmend.torch as mmt
from meshmend.errors import ParameterError, QuarantineError
from meshmend.launch.timeline import read_timeline
from meshmend.launch.watching import Watch
from meshmend.quarantine import QuarantineList, Suspect
from timelines import check_fields
from torch_engine.processes import with_store

PAUSE_S = 0.2


def step(manager: Any, **facts: Any) -> bool:
    manager.start_quorum()
    manager.allreduce(torch.ones(3)).wait()
    time.sleep(PAUSE_S)
    manager.note(**facts)
    return bool(manager.should_commit())


def life(shared: Path | None, use_async_quorum: bool, disk_step: int) -> list[str]:
    """Do three steps, lose one to an error, save, do another; return the events."""
    warnings.simplefilter("ignore", DeprecationWarning)  # torchft's own logging would fail each quorum
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = mmt.MeshProcessGroup("2x2", (1, 0), interface="lo", timeout=timedelta(seconds=20))
    manager = mmt.Manager(
        group,
        lambda _: None,
        dict,
        1,
        use_async_quorum=use_async_quorum,
        shared=shared,
        rank=0,
        world_size=1,
        replica_id="chip2",
        hostname="127.0.0.1",
        lighthouse_addr=f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}",
        store_addr="127.0.0.1",
        store_port=store.port,
    )
    if disk_step:
        manager.load_state_dict({"step": disk_step, "batches_committed": disk_step})
    assert all(step(manager, loss=1 / n, examples=8, waited_s=0.01) for n in (1, 2, 3))
    manager.start_quorum()
    manager.wait_quorum()
    time.sleep(PAUSE_S)
    manager.report_error(ValueError("a bad batch"))
    assert not manager.should_commit()
    assert step(manager)
    with manager.timeline.timed("checkpoint", step=manager.current_step()):
        time.sleep(PAUSE_S)
    manager.timeline.note("saved", step=manager.current_step())
    assert step(manager)
    manager.shutdown()
    lighthouse.shutdown()
    return [event["event"] for event in manager.timeline.events]


@pytest.mark.parametrize("use_async_quorum", [False, True])
def test_a_chip_writes_down_what_a_host_does(tmp_path: Path, use_async_quorum: bool) -> None:
    def main(chip: tuple[int, ...], number: int, address: str) -> list[str]:
        return life(tmp_path, use_async_quorum, disk_step=0) + life(tmp_path, use_async_quorum, disk_step=4)

    (events,) = with_store([(1, 0)], main).values()
    begins = ["quorum", "join", "plan", "step"]
    once = ["process", "round", *begins, "step", "step", "gave up", *begins, "checkpoint", "saved", "step", "done"]
    assert events == once * 2
    (path,) = (tmp_path / "timeline").iterdir()
    assert path.name == "host-2.jsonl"  # chip (1, 0) of 2×2
    written = read_timeline(path)
    check_fields(written)
    assert [event["event"] for event in written] == events
    quorums = [event for event in written if event["event"] == "quorum"]
    assert [(one["step"], one["source"]) for one in quorums] == [
        (0, "in place"),
        (3, "in place"),
        (4, "disk"),
        (7, "in place"),
    ]
    assert sorted({one["round"] for one in quorums}) == [one["round"] for one in quorums]
    assert all(one["hosts"] == [2] and one["chips"] == 1 for one in quorums)
    watch = Watch(tmp_path)
    watch.read()
    account = watch.account()
    assert account is not None
    assert watch.state(account) == "over"
    assert (account.step, account.machine, len(account.recoveries)) == (9, "2x2 in hosts of 1x1", 3)
    assert account.training_s + sum(account.badput_s.values()) == pytest.approx(account.total_s)
    # The second life began at step 4, and did the fifth of the first again.
    assert account.badput_s["steps done again"] >= PAUSE_S
    assert account.badput_s["checkpoint"] >= 2 * PAUSE_S
    assert account.badput_s["data"] == pytest.approx(2 * 2 * 0.01)
    assert all(account.recoveries[i].stages_s["detect"] >= PAUSE_S for i in (0, 2))


@pytest.mark.usefixtures("compiler")
def test_a_chip_needs_no_more_than_its_group_and_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(chip: tuple[int, ...], number: int, address: str) -> tuple[bool, int, list[str], float]:
        warnings.simplefilter("ignore", DeprecationWarning)
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}")
        group = mmt.MeshProcessGroup("2x2", (1, 0), interface="lo")
        layer = torch.nn.Linear(1, 1)
        manager = mmt.Manager.of(group, layer=layer, sgd=torch.optim.SGD(layer.parameters(), lr=0.5))
        committed = step(manager)  # one of four chips: no majority
        saved = manager._manager_state_dict()["user"]["default"]
        saved = {"layer": {"weight": torch.tensor([[7.0]]), "bias": torch.zeros(1)}, "sgd": saved["sgd"]}
        manager._load_state_dict_fns["default"](saved)
        least = next(event["least"] for event in manager.timeline.events if event["event"] == "round")
        manager.shutdown()
        lighthouse.shutdown()
        return committed, least, sorted(saved), layer.weight.item()

    (found,) = with_store([(1, 0)], main).values()
    assert found == (False, 3, ["layer", "sgd"], 7.0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, r"as in Manager\.of\(group, model=model\)"),
        ({"min_replica_size": 2}, "min_replica_size has not"),
        ({"layer": torch.nn.Linear(1, 1)}, "Where is the lighthouse.*TORCHFT_LIGHTHOUSE"),
    ],
)
def test_what_is_missing_is_said(parts: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    group = mmt.MeshProcessGroup("2x2", (1, 0), interface="lo")
    with pytest.raises(ParameterError, match=message):
        mmt.Manager.of(group, **parts)


@pytest.mark.parametrize("suspect", ["1,0", "host 2"])
def test_a_chip_in_quarantine_is_refused_before_anybody_hears_of_it(tmp_path: Path, suspect: str) -> None:
    # No lighthouse is needed to find out.
    QuarantineList(tmp_path).add(Suspect.parse(suspect), why="burnt")
    group, layer = mmt.MeshProcessGroup("2x2", (1, 0), interface="lo"), torch.nn.Linear(1, 1)
    with pytest.raises(QuarantineError, match=rf"Chip \(1,0\) leaves the job: {suspect} is in .* because of burnt"):
        mmt.Manager.of(group, shared=tmp_path, layer=layer)
    (event,) = [one for one in read_timeline(tmp_path / "timeline/host-2.jsonl") if one["event"] == "quarantined"]
    assert (event["suspect"], event["chips"], event["by"]) == (suspect, [[1, 0]], "by hand")


def test_the_list_is_read_again_in_each_quorum(tmp_path: Path) -> None:
    def main(chip: tuple[int, ...], number: int, address: str) -> tuple[list[str], str]:
        warnings.simplefilter("ignore", DeprecationWarning)
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
        at = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
        group = mmt.MeshProcessGroup("2x2", (1, 0), interface="lo")
        manager = mmt.Manager(group, lambda _: None, dict, 1, shared=tmp_path, lighthouse_addr=at)
        assert step(manager)
        (tmp_path / "quarantine.json").write_text("torn")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UserWarning)
            assert step(manager)  # a job that trains does not stop for a list that cannot be read
        (tmp_path / "quarantine.json").unlink()
        QuarantineList(tmp_path).add(Suspect.parse("1,0"), why="burnt")
        with pytest.raises(QuarantineError) as caught:
            manager.start_quorum()
        lighthouse.shutdown()
        return [str(one.message) for one in warned if one.category is UserWarning], str(caught.value)

    ((warned, left),) = with_store([(1, 0)], main).values()
    assert any("so the one read before still counts" in text for text in warned)
    assert "Chip (1,0) leaves the job: 1,0 is in quarantine" in left
    events = [event["event"] for event in read_timeline(tmp_path / "timeline/host-2.jsonl")]
    assert events[-3:] == ["step", "quarantined", "gave up"]


def test_a_list_of_another_machine_is_refused(tmp_path: Path) -> None:
    QuarantineList(tmp_path).add(Suspect.parse("5,0"), why="burnt")
    group = mmt.MeshProcessGroup("2x2", (1, 0), interface="lo")
    with pytest.raises(QuarantineError, match="There is no chip 5,0 in this machine"):
        mmt.Manager.of(group, shared=tmp_path, layer=torch.nn.Linear(1, 1))


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def main(chip: tuple[int, ...], number: int, address: str) -> list[str]:
        return life(None, use_async_quorum=False, disk_step=0)

    (events,) = with_store([(1, 0)], main).values()
    assert events.count("step") == 5
    assert list(tmp_path.iterdir()) == []
