"""What PyTorch plans for: the hardware that the caller, the plan function or the machine names, for all collectives.

Each case is priced on the links as they are, and held against the plan that is made for them directly.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshmend import Mesh, plan, predict
from meshmend.cost import Hardware, find_hardware
from meshmend.cost.hardware import adjusted, write_hardware
from meshmend.errors import ParameterError
from meshmend.planning import PlanCache, plan_broadcast, plan_shards
from meshmend.schedule import Collective
from rows import others_slow

pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import meshmend.torch as mmt
from meshmend.torch.plans import MESSAGE_S, Plans, as_driven

MESH = Mesh("4x4", failed=["2x2@0,0"])
ETHERNET = find_hardware("ethernet-10g")
LINKS = {
    "40 Mbit/s": adjusted(ETHERNET, link_bytes_per_s=5e6),
    "slow steps": adjusted(ETHERNET, step_latency_s=5e-4),
    "loopback": find_hardware("gloo-loopback"),
}
SIZES = (2**13, 2**23)


def clear(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHAPE", "CHIP", "WRAP", "MACHINE"):
        monkeypatch.delenv(f"MESHMEND_{name}", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.mark.parametrize(
    ("way", "name"),
    others_slow(
        [("hardware=", "40 Mbit/s"), ("hardware=", "loopback")]
        + [(way, "slow steps") for way in ("a file", "bound to plan", "the machine's")],
        quick=[("the machine's", "slow steps")],
    ),
)
def test_a_group_runs_the_plans_for_its_links(
    way: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear(monkeypatch)
    links = LINKS[name]
    write_hardware(links, tmp_path / "links.json", {})
    (tmp_path / "mine.json").write_text('{"meshmend": 1, "shape": "4x4", "hardware": "links.json"}')
    ways: dict[str, dict[str, Any]] = {
        "hardware=": {"shape": "4x4", "hardware": links},
        "a file": {"shape": "4x4", "hardware": str(tmp_path / "links.json")},
        "bound to plan": {"shape": "4x4", "plan": partial(plan, hardware=links)},
        "the machine's": {"machine": tmp_path / "mine.json"},
    }
    given = ways[way]
    plans = mmt.MeshOptions(chip=(3, 3), **given).plans()
    order = tuple(range(12))
    for size in SIZES:
        driven, mode = as_driven(links), plans.mode
        target: dict[str, Any] = {"payload_bytes": size, "hardware": driven}
        pairs = [(plans.get(MESH, size), plan(MESH, **target, mode=mode))]
        pairs += [
            (plans.shards(MESH, half, order, size), plan_shards(MESH, half, order=order, **target, mode=mode))
            for half in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        ]
        pairs.append((plans.broadcast(MESH, 5, size), plan_broadcast(MESH, 5, **target)))
        for ours, best in pairs:
            seconds = [predict(one, size, driven, mode=mode).seconds for one in (ours, best)]
            assert seconds[0] <= 1.05 * seconds[1]
    pytest.importorskip("torchft", reason="torchft is not installed: pip install 'meshmend[torch]'")
    assert mmt.MeshProcessGroup(chip=(3, 3), **given).hardware == links


def test_what_is_bound_to_plan_does_not_bring_other_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clear(monkeypatch)
    loopback = find_hardware("gloo-loopback")
    cache = PlanCache(tmp_path)
    options = mmt.MeshOptions("4x4", (3, 3), plan=partial(plan, cache=cache), interface="lo")
    for size in SIZES:
        ours, best = options.plans().get(MESH, size), plan(MESH, payload_bytes=size, hardware=loopback)
        for mode in ("lock-step", "asynchronous"):
            seconds = [predict(one, size, loopback, mode=mode).seconds for one in (ours, best)]  # type: ignore[arg-type]
            assert seconds[0] <= 1.05 * seconds[1]
    kept = len(list(tmp_path.iterdir()))
    options.plans().shards(MESH, Collective.ALL_GATHER, tuple(range(12)), 2**21)
    assert len(list(tmp_path.iterdir())) > kept  # the cache serves other collectives, too


def test_a_function_of_ones_own_needs_no_hardware() -> None:
    plans = Plans(lambda mesh, payload_bytes: plan(mesh, "weave", chunks=payload_bytes // 512), hardware="ideal")
    assert plans.get(MESH, 2048).total_chunks == 4


def test_where_nobody_says_it_processes_of_one_machine_are_told_from_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    clear(monkeypatch)
    assert mmt.MeshOptions("2x2", (0, 0), interface="lo").plans().hardware.name == "gloo-loopback"
    assert mmt.MeshOptions("2x2", (0, 0), interface="eth0").plans().hardware.name == "ethernet-10g"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert mmt.MeshOptions("2x2", (0, 0)).plans().hardware.name == "gloo-loopback"


def test_hardware_is_said_once() -> None:
    twice = mmt.MeshOptions("2x2", (0, 0), hardware="ideal", plan=partial(plan, hardware="tpu-v4"))
    with pytest.raises(ParameterError, match="hardware is ideal, but tpu-v4 is bound to plan: say it once"):
        twice.plans()


def test_over_links_plans_have_slack_and_on_loopback_none() -> None:
    """There the cores are busy while latency passes."""
    links = Hardware("links", 1e6, hop_latency_s=5e-3)
    ours, driven = Plans(hardware=links).get(MESH, 2**20), as_driven(links)
    assert driven.message_s == MESSAGE_S
    assert as_driven(find_hardware("gloo-loopback")) == find_hardware("gloo-loopback")
    size = Plans.size(2**20)
    assert ours == plan(MESH, payload_bytes=size, hardware=driven, mode="asynchronous")
    without = plan(MESH, payload_bytes=size, hardware=driven)
    times = [predict(one, 2**20, driven, mode="asynchronous").seconds for one in (ours, without)]
    assert times[0] < 0.8 * times[1]
    assert Plans(partial(plan, mode="lock-step"), hardware=links).get(MESH, 2**20) == without
    shards = Plans(hardware=links).shards(MESH, Collective.ALL_GATHER, tuple(range(MESH.n_chips)), 2**20)
    assert (
        shards.n_steps
        > Plans(partial(plan, mode="lock-step"), hardware=links)
        .shards(MESH, Collective.ALL_GATHER, tuple(range(MESH.n_chips)), 2**20)
        .n_steps
    )
    assert Plans(hardware="gloo-loopback").mode == "lock-step"
