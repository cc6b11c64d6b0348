"""Damaged copies and checkpoints: what is restored was truly saved at the step that it claims, or there is an error.

Each case damages a few files of small states that were really saved, in one of the ways that disks, memory, operators
and old files do it, and restores. The test knows every state that was saved, bit by bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import pytest

from jax_engine.restart_cases import Started, Vectors, assert_is_step, elements, empty, finish_save
from meshmend.errors import RestartError
from meshmend.jax.state.holdings import Holdings
from meshmend.jax.state.memory.collect import NeededParts
from meshmend.jax.state.memory.copies import MAGIC, Copy, HostMemory, PartReader
from meshmend.jax.state.memory.peer_copy import copy_of, make_parts_fn
from meshmend.jax.state.memory.placement import place
from meshmend.jax.state.recovery import Holder, StateSearch, recover
from protocols import run_together

# Orbax reads many arrays at once; when one of them fails, the others' results come to an event loop that has ended.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Damage = Callable[[Path, list[Path], random.Random], None]
JUNK: list[Any] = [None, -1, 10**30, "", "x", [], {}, [[]], 0.5, True, "9" * 5000, [10**12], {"float32": -1}]
LONGEST_S = 60.0
"""Seconds that a case may take on a busy machine: longer is a hang."""


def flip_bit(path: Path, _: list[Path], rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def scribble(path: Path, _: list[Path], rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data) + 1)
    data[at : at + rng.randrange(1, 40)] = rng.randbytes(rng.randrange(0, 40))
    path.write_bytes(data)


def truncate(path: Path, _: list[Path], rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size + 1)])


def lengthen(path: Path, _: list[Path], rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 20)))


def erase(path: Path, _: list[Path], __: random.Random) -> None:
    path.write_bytes(b"")


def delete(path: Path, _: list[Path], __: random.Random) -> None:
    path.unlink()


def swap(path: Path, others: list[Path], rng: random.Random) -> None:
    other = rng.choice(others)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def replace(path: Path, others: list[Path], rng: random.Random) -> None:
    path.write_bytes(rng.choice(others).read_bytes())


def link(path: Path, others: list[Path], rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(rng.choice([rng.choice(others), Path("/dev/zero"), path, Path("/nowhere"), path.parent]))


def make_folder(path: Path, _: list[Path], __: random.Random) -> None:
    path.unlink()
    path.mkdir()


def make_huge(path: Path, _: list[Path], __: random.Random) -> None:
    os.truncate(path, 1 << 40)  # sparse: takes no room, unless it is read


def make_pipe(path: Path, _: list[Path], __: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def forge(facts: Any, rng: random.Random) -> Any:
    """Replace or drop one value anywhere in facts, but not what the user kept with them: that may be anything."""
    path: list[Any] = []
    at = facts
    while isinstance(at, dict | list) and at and (not path or rng.random() < 0.6):
        path.append(rng.choice([key for key in at if key != "extra"] if isinstance(at, dict) else range(len(at))))
        at = at[path[-1]]
    parent = facts
    for key in path[:-1]:
        parent = parent[key]
    if rng.random() < 0.2:
        del parent[path[-1]]
    else:
        parent[path[-1]] = rng.choice(JUNK)
    return facts


def forge_header(path: Path, _: list[Path], rng: random.Random) -> None:
    """Metadata that make no sense under a checksum that is right."""
    magic, line, rest = path.read_bytes().split(b"\n", 2)
    length = int(line.split()[0])
    header = json.dumps(forge(json.loads(rest[:length]), rng)).encode()
    new = f"{len(header)} {hashlib.sha256(header).hexdigest()} -\n".encode()
    path.write_bytes(magic + b"\n" + new + header + rest[length:])


def mix_header(path: Path, others: list[Path], rng: random.Random) -> None:
    """The metadata of one copy before the values of another."""

    def halves(data: bytes) -> tuple[bytes, bytes]:
        if not data.startswith(MAGIC):
            return data, b""
        line = data[len(MAGIC) :].split(b"\n", 1)[0]
        at = len(MAGIC) + len(line) + 1 + int(line.split()[0])
        return data[:at], data[at:]

    path.write_bytes(halves(rng.choice(others).read_bytes())[0] + halves(path.read_bytes())[1])


def forge_facts(path: Path, _: list[Path], rng: random.Random) -> None:
    """The same on disk: facts that make no sense under a checksum that is right."""
    written = json.loads(path.read_text())
    text = json.dumps(forge(json.loads(written["facts"]), rng))
    if rng.random() < 0.2:
        path.write_text(json.dumps(forge(written, rng)))
    else:
        path.write_text(json.dumps({"facts": text, "checksum": hashlib.sha256(text.encode()).hexdigest()}))


ANYWHERE: list[Damage] = [
    flip_bit,
    flip_bit,
    scribble,
    truncate,
    lengthen,
    erase,
    delete,
    swap,
    replace,
    link,
    make_folder,
    make_huge,
    make_pipe,
]
IN_MEMORY: list[Damage] = [*ANYWHERE, forge_header, mix_header]


def plain_files(folder: Path) -> list[Path]:
    """The files in folder, in an order that is the same in every run although Orbax names its data files at random."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path.name != "lock"]
    return sorted(files, key=lambda path: (re.sub("[0-9a-f]{32}", "", str(path)), path.stat().st_size))


class Hosts:
    """Three hosts of two chips each, all of them this process, that have kept steps 3, 4 and 5 in memory."""

    STEPS = (3, 4, 5)

    def __init__(self, folder: Path) -> None:
        self.job = Started(shape="2x3", sharded=True, memory_every=0)
        self.job.restore()
        self.layout = layout = self.job.layout
        self.saved = {step: elements(self.job, self.job.values(step)) for step in self.STEPS}
        placement = place(layout.fabric, host_of_chip=[0, 0, 1, 1, 2, 2])
        cut = jax.jit(make_parts_fn(layout, placement))
        self.kept: dict[str, bytes] = {}
        for host in range(3):
            memory = HostMemory(folder / str(host))
            for step in self.STEPS:
                parts = cut(*self.job.values(step))
                memory.pinned = frozenset({3})
                memory.write(copy_of(parts, layout, placement, host, 1, step, ["after", step], "run"))
            memory.lock.release()
        self.folder = folder
        self.words: list[Any] = [None] * 3
        self.barrier = threading.Barrier(3)
        self.process = threading.local()
        self.kept = {str(path.relative_to(folder)): path.read_bytes() for path in plain_files(folder)}

    def lay_down(self) -> list[Path]:
        """Put all files back as they were written."""
        shutil.rmtree(self.folder)
        for name, data in self.kept.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(data)
        return [self.folder / name for name in self.kept]

    def restore(self) -> tuple[int, Any, Vectors] | None:
        """What the processes of all hosts do between them; None where nothing is whole."""
        held = [self.holdings(process) for process in range(3)]
        judges = [StateSearch((0, 1, 2), 2, "memory", lambda *_: 1, one.describe_own) for one in held]
        said = [Holder(one.have, one.describe, one.take, one.send) for one in held]
        try:
            _, last = run_together([recover(i, judges[i], said[i]) for i in range(3)]).results[0]
            with ThreadPoolExecutor(3) as threads, patch("meshmend.jax.state.holdings.gather", self.gather):
                needed = list(threads.map(lambda one: self.receive(one, last), held))
        except RestartError as error:
            if not re.search("Nothing of what this job has kept can be restored|another model", str(error)):
                raise
            return None
        finally:
            for one in held:
                one.close()
                assert one.memory is not None
                one.memory.lock.release()
        states = [self.vectors(one) for one in needed]
        assert states[0].keys() == states[1].keys() == states[2].keys()
        assert all(bytes(states[0][name]) == bytes(other[name]) for other in states for name in other)
        return last["source"]["step"], last["extra"], states[0]

    def holdings(self, process: int) -> Holdings:
        session: Any = SimpleNamespace(launch=SimpleNamespace(process=process, start_over=0), host=process)
        memory = HostMemory(self.folder / str(process))
        return Holdings(session, self.layout, memory, None, untrusted=None, cleans_up=False)

    def receive(self, one: Holdings, last: Any) -> Any:
        self.process.number = one.session.launch.process
        return one.receive(last)

    def vectors(self, needed: Any) -> Vectors:
        """All of this process's devices need all of the state."""
        found = empty(self.layout.outline)
        for name, start, stop in set(self.layout.needs()):
            found[name][start:stop] = needed(name, start, stop)
        return found

    def exchange(self, process: int, word: Any) -> list[Any]:
        self.words[process] = word
        self.barrier.wait(LONGEST_S)
        told = list(self.words)
        self.barrier.wait(LONGEST_S)
        return told

    def gather(self, parts: NeededParts, sent_by: dict[tuple[int, int], int], read: Any, _: Any) -> None:
        """Stands for `gather`, which would send by devices what each process is to provide."""
        me, slices = self.process.number, parts.outline.slices
        mine = [
            ((part, which), read(part, *slices(part)[which]))
            for (part, which), process in sent_by.items()
            if process == me
        ]
        for sent in self.exchange(me, mine):
            for (part, which), data in sent:
                parts.put(part, slices(part)[which][0], np.frombuffer(data, np.uint8))


def test_a_copy_that_vanishes_after_it_was_listed_comes_from_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path)

    def open_copy(copy: Copy) -> PartReader:
        if copy.path.parent.name == "1":
            copy.path.unlink(missing_ok=True)
        return PartReader(copy)

    monkeypatch.setattr("meshmend.jax.state.holdings.PartReader", open_copy)
    found = hosts.restore()
    assert found is not None
    assert {name: vector.tobytes() for name, vector in found[2].items()} == hosts.saved[found[0]]
    assert found[0] == 5


def damage_memory(folder: Path, seeds: range) -> Counter[str]:
    hosts = Hosts(folder)
    seen: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        files = hosts.lay_down()
        for path in rng.sample(files, rng.choice([1, 1, 2, 4, 6])):
            damage = rng.choice(IN_MEMORY)
            others = [other for other in files if other != path and other.is_file() and not other.is_symlink()
                      and other.stat().st_size < 1 << 20]  # fmt: skip
            if path.is_file() and others and path.stat().st_size < 1 << 20:
                try:
                    damage(path, others, rng)
                except (ValueError, KeyError):  # a file that is no copy any more has no header to forge
                    continue
                seen[damage.__name__] += 1
        begun = time.monotonic()
        found = hosts.restore()
        assert time.monotonic() - begun < LONGEST_S
        seen["cases"] += 1
        if found is None:
            seen["nothing whole"] += 1
            continue
        step, extra, vectors = found
        assert extra == ["after", step], seed
        assert {name: vector.tobytes() for name, vector in vectors.items()} == hosts.saved[step], seed
        seen["restored"] += 1
    return seen


class OnDisk:
    """A job of one host with steps 2 and 4 on disk, and 3, 4 and 5 in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.whole = folder / "work", folder / "whole"
        job = Started(sharded=True, **self.options(self.whole))
        job.restore()
        job.keep(2)
        job.keeper.memory.pinned = frozenset({3})
        job.keep(3, 4, 5)
        assert job.keeper._mirror is not None
        job.keeper._mirror.wait()
        finish_save(job)
        assert job.keeper.disk is not None
        job.keeper.disk.close()
        job.keeper.memory.lock.release()

    @staticmethod
    def options(folder: Path) -> dict[str, Any]:
        return {"memory": folder / "memory", "disk": folder / "disk", "disk_every": 2, "disk_timeout_s": LONGEST_S / 3}

    def restore(self, memory: bool) -> str:
        job = Started(sharded=True, **self.options(self.folder), memory_every=1 if memory else 0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                found = job.restore()
            assert found.source != "start"
            assert_is_step(job, found, found.step)
            assert found.step in ((3, 4, 5) if found.source == "memory" else (2, 4))
        except RestartError as error:
            return "refused" if "can be restored" in str(error) else f"refused: {error}"
        finally:
            job.keeper.memory.lock.release()
        return found.source


def damage_disk(folder: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    on_disk = OnDisk(folder)
    # The mirror compiles for what comes after the restore: that is not in question here.
    monkeypatch.setattr("meshmend.jax.state.keeper.Mirror", lambda *_, **__: SimpleNamespace(compile=lambda *_: None))
    seen: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        shutil.rmtree(on_disk.folder, ignore_errors=True)
        shutil.copytree(on_disk.whole, on_disk.folder)
        memory = rng.random() < 0.3
        files = {step: plain_files(on_disk.folder / "disk" / str(step)) for step in (2, 4)}
        copies = plain_files(on_disk.folder / "memory")
        chosen = rng.sample(files[4], rng.choice([1, 1, 2, 5])) + rng.sample(files[2], rng.choice([0, 0, 1]))
        if rng.random() < 0.05:
            (on_disk.folder / "disk" / "2").rename(on_disk.folder / "disk" / "x")
            (on_disk.folder / "disk" / "4").rename(on_disk.folder / "disk" / "2")
            (on_disk.folder / "disk" / "x").rename(on_disk.folder / "disk" / "4")
            chosen, seen["swapped steps"] = [], seen["swapped steps"] + 1
        if memory:
            chosen += rng.sample(copies, rng.choice([0, 1, 2, 3]))
        for path in chosen:
            kinds = IN_MEMORY if path in copies else ANYWHERE
            damage = forge_facts if path.parent.name == "meshmend" and rng.random() < 0.5 else rng.choice(kinds)
            others = [p for p in plain_files(on_disk.folder) if p != path and p.stat().st_size < 1 << 20]
            same = [other for other in others if other.name == path.name]
            others = same if same and rng.random() < 0.7 else others
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
                try:
                    damage(path, others, rng)
                except (ValueError, KeyError):
                    continue
                seen[damage.__name__] += 1
        begun = time.monotonic()
        seen[on_disk.restore(memory)] += 1
        assert time.monotonic() - begun < LONGEST_S, seed
        seen["cases"] += 1
    return seen


@pytest.mark.parametrize("seeds", [range(110), pytest.param(range(1000, 4000), marks=pytest.mark.slow)], ids=len)
def test_damaged_copies_in_memory_are_never_restored_as_something_else(seeds: range, tmp_path: Path) -> None:
    seen = damage_memory(tmp_path, seeds)
    assert seen["cases"] == len(seeds)
    assert min(seen["restored"], seen["nothing whole"]) > 5
    assert {damage.__name__ for damage in IN_MEMORY} <= set(seen)


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(10_000, 12_000), marks=pytest.mark.slow)], ids=len)
def test_damaged_checkpoints_are_never_restored_as_something_else(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = damage_disk(tmp_path, seeds, monkeypatch)
    assert seen["cases"] == len(seeds)
    assert min(seen["disk"], seen["memory"], seen["refused"]) > 0
    assert all("of another model" in word for word in seen if word.startswith("refused: "))
