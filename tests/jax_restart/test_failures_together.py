"""Hosts of the README's job fail at the same moment, and their memory is lost: what is left resumes from memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from meshmend.launch.timeline import read_timeline

ROOT = Path(__file__).parents[2]
HOSTS = range(6)
CHANGES: dict[str, list[tuple[str, str]]] = {
    "replicated": [],
    "sharded": [("steps=100", 'update="sharded", steps=100')],
    "fsdp": [
        ("def loss(params, batch):", "def loss(params, batch, pair):"),
        ("    hidden = jax", "    params = mmj.fsdp.gather_params(params, pair)\n    hidden = jax"),
        (
            "init(np.random.default_rng(0)), dataset, steps=100",
            "lambda fabric, pair: mmj.fsdp.shard_params(init(np.random.default_rng(0)), fabric, pair), dataset, "
            'update="fsdp", steps=100',
        ),
    ],
}
AROUND = (0, 1, 2, 5, 4, 3)
"""The hosts, each a cable away from the one before. Half of the way around are those that keep each other's shards."""
APART = [pair for pair in combinations(HOSTS, 2) if abs(AROUND.index(pair[0]) - AROUND.index(pair[1])) != 3]
"""Pairs of which neither keeps the other's shards."""


def lost_at_once(
    folder: Path, lost: tuple[int, ...], *words: str, state: str = "replicated", kill: int = 9, **options: Any
) -> tuple[str, list[tuple[str, int]], int]:
    """Run the README's job and kill hosts after a step; return what was shown, what a survivor restored, and when.

    A round may have one host: some sets of hosts cut the mesh in two.
    """
    text = (ROOT / "examples/jax/survive.py").read_text(encoding="utf-8")
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    changes = [*CHANGES[state], ("steps=100", f"steps={kill + 15}"), ("global_batch=256", f"global_batch=256{given}")]
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "train.py").write_text(text, encoding="utf-8")
    kills = [word for host in lost for word in ("--kill", f"{host}@{kill}")]
    command = ["run", "--local", "4x6", "--host", "2x2", "--hosts", "1:6", *kills, *words, "train.py"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1", "COLUMNS": "300"}
    done = subprocess.run(
        [sys.executable, "-m", "meshmend", *command], cwd=folder, env=env, check=False, capture_output=True, text=True
    )
    shown = done.stdout + done.stderr
    killed = {int(host): int(step) for host, step in re.findall(r"host (\d) is killed after step (\d+)", shown)}
    assert set(killed) == set(lost), shown
    restored: list[tuple[str, int]] = []
    for host in sorted({*HOSTS} - {*lost}):
        events = read_timeline(folder / f"shared/timeline/host-{host}.jsonl")
        found = [(event["source"], event["step"]) for event in events if event["event"] == "restore"]
        restored = max(restored, found, key=len)
    assert (done.returncode == 0) == (f"done: {kill + 15} steps" in shown), shown
    return shown, restored, min(killed.values())


SETS = [
    *((pair, 40) for pair in combinations(HOSTS, 2)),
    *((triple, 40) for triple in combinations(HOSTS, 3)),
]


@pytest.mark.parametrize(
    ("lost", "kill"), [((1, 2), 9), *(pytest.param(*one, marks=pytest.mark.slow, id=str(one[0])) for one in SETS)]
)
def test_a_replicated_job_resumes_from_memory_whichever_hosts_fail(
    lost: tuple[int, ...], kill: int, tmp_path: Path
) -> None:
    shown, restored, last = lost_at_once(tmp_path, lost, kill=kill)
    assert "copies in memory survive the failure of any 5 of 6 hosts at once: each keeps the whole state" in shown
    assert [source for source, _ in restored] == ["start", "memory"]
    assert 4 <= restored[1][1] <= last + 3


@pytest.mark.slow
@pytest.mark.parametrize("state", ["sharded", "fsdp"])
@pytest.mark.parametrize("lost", APART, ids=str)
def test_shards_survive_hosts_of_which_neither_keeps_the_others(
    lost: tuple[int, ...], state: str, tmp_path: Path
) -> None:
    shown, restored, last = lost_at_once(tmp_path, lost, state=state, memory_every=1, disk_every=0)
    assert re.search(
        r"survive the failure of any 1 of 6 hosts at once: .*its own shards and those of 1 other host", shown
    )
    assert [source for source, _ in restored] == ["start", "memory"]
    assert last - 3 <= restored[1][1] <= last + 3


@pytest.mark.slow
@pytest.mark.parametrize("state", ["sharded", "fsdp"])
@pytest.mark.parametrize("disk_every", [0, 3])
def test_shards_of_hosts_that_keep_each_others_come_from_disk_or_not_at_all(
    disk_every: int, state: str, tmp_path: Path
) -> None:
    shown, restored, _ = lost_at_once(tmp_path, (2, 3), state=state, memory_every=1, disk_every=disk_every)
    if disk_every:
        assert [source for source, _ in restored] == ["start", "disk"]
        assert restored[1][1] >= disk_every
    else:
        assert [source for source, _ in restored] == ["start"]
        assert re.search(r"lack \d+ of \d+ parts, which only hosts 2, 3 have", shown)
        assert "--start-over" in shown


@pytest.mark.slow
@pytest.mark.parametrize("state", ["sharded", "replicated", "fsdp"])
def test_a_failure_domain_may_fail(state: str, tmp_path: Path) -> None:
    """Hosts 0 and 3 are in one, so that neither keeps the other's shards."""
    words = ("--domain", "a,b,c,a,b,c")
    shown, restored, last = lost_at_once(tmp_path, (0, 3), *words, state=state, memory_every=1, disk_every=0)
    assert re.search(r"survive the failure of any \d of 6 hosts at once, and of any failure domain: ", shown)
    assert [source for source, _ in restored] == ["start", "memory"]
    assert last - 3 <= restored[1][1] <= last + 3
