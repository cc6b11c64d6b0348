"""What PyTorch plans for: the hardware that the caller, the plan function or the machine names, for all collectives.

Each case is priced on the links as they are, and held against the plan that is made for them directly.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshmend import Mesh, plan, predict
from meshmend.cost import find_hardware
from meshmend.cost.hardware import adjusted, write_hardware
from meshmend.errors import ParameterError
from meshmend.planning import PlanCache, plan_broadcast, plan_shards
from meshmend.schedule import Collective

pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import meshmend.torch as mmt
from meshmend.torch.plans import Plans

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
    [("hardware=", "40 Mbit/s"), ("hardware=", "loopback")]
    + [(way, "slow steps") for way in ("a file", "bound to plan", "the machine's")],
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
        target: dict[str, Any] = {"payload_bytes": size, "hardware": links}
        pairs = [(plans.get(MESH, size), plan(MESH, **target))]
        pairs += [
            (plans.shards(MESH, half, order, size), plan_shards(MESH, half, order=order, **target))
            for half in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        ]
        pairs.append((plans.broadcast(MESH, 5, size), plan_broadcast(MESH, 5, **target)))
        for ours, best in pairs:
            assert predict(ours, size, links).seconds <= 1.05 * predict(best, size, links).seconds
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
