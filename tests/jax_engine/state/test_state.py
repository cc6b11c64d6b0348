"""State that outlives its mesh: bit-identical after any resharding, through memory and through disk."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_engine.restart_cases import Vectors, collect, empty, read_vectors, vectors_of, with_parts
from jax_engine.state.trained import Trained
from meshmend.errors import RestartError
from meshmend.jax.state.candidates import Source, rank_sources
from meshmend.jax.state.disk.disk import Disk
from meshmend.jax.state.layout.flat import Outline
from meshmend.jax.state.layout.state_layout import StateLayout
from meshmend.jax.state.layout.tree_signature import Identity
from meshmend.jax.state.memory import collect as gathering
from meshmend.jax.state.memory.copies import ASIDE, LAYOUT, Copy, HostMemory, PartReader, read_copy
from meshmend.jax.state.memory.peer_copy import copy_of, make_parts_fn
from meshmend.jax.state.memory.placement import place
from meshmend.jax.state.recovery import wanted_slices
from meshmend.launch.hosts import Hosts
from rows import others_slow

HOSTS = Hosts.of("8x8", "4x2")


class OnHosts(Trained):
    """On 8×8 chips without the hosts in `lost`."""

    def __init__(self, lost: tuple[int, ...], kind: str) -> None:
        super().__init__(kind, [HOSTS.tiles[host] for host in lost], "8x8", "hamiltonian")

    @cached_property
    def state(self) -> tuple[Any, Any]:
        return self.after_two_steps()

    def host_of_chip(self) -> list[int]:
        """Pretend that this process were all the hosts."""
        chips = {chip: host for host in range(len(HOSTS)) for chip in HOSTS.chips(host)}
        return [chips[self.fabric.mesh.chip(rank)] for rank in range(self.fabric.mesh.n_chips)]

    def vectors(self) -> Vectors:
        return vectors_of(self.layout, self.state)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module", params=others_slow(["two-phase", "replicated", "fsdp"], quick=["two-phase"]))
def whole(request: pytest.FixtureRequest) -> OnHosts:
    return OnHosts((), request.param)


@pytest.fixture(scope="module")
def holed(whole: OnHosts) -> OnHosts:
    return OnHosts((5,), whole.kind)


def test_bit_identical_on_64_then_56_then_64_chips(whole: OnHosts, holed: OnHosts) -> None:
    vectors = whole.vectors()
    smaller = holed.layout.to_devices(read_vectors(vectors), holed.fresh)
    back = vectors_of(holed.layout, smaller)
    assert {name: v.tobytes() for name, v in back.items()} == {name: v.tobytes() for name, v in vectors.items()}
    assert bits(whole.layout.to_devices(read_vectors(back), whole.fresh)) == bits(whole.state)


def test_a_step_on_the_smaller_mesh_takes_the_state_up(whole: OnHosts, holed: OnHosts) -> None:
    params, state = holed.layout.to_devices(read_vectors(whole.vectors()), holed.fresh)
    for new, old in zip(jax.tree.leaves((params, state)), jax.tree.leaves(holed.fresh), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
    assert int(jax.tree.leaves(state)[-1]) == 2
    # One more step, on both meshes, with gradients of the same exact mean.
    new = {}
    for trained, (weights, moments) in ((whole, whole.state), (holed, (params, state))):
        batch = jnp.full((trained.fabric.mesh.n_chips, 1), 2.0)
        found = jax.jit(trained.training.step)(weights, moments, batch, trained.program)[:2]
        new[trained] = bits(vectors_of(trained.layout, found))
    assert new[holed] == new[whole]
    assert new[whole] != bits(whole.vectors())


def copies_of(trained: OnHosts, step: int = 7, **placed: Any) -> dict[int, Copy]:
    placement = place(trained.fabric, host_of_chip=trained.host_of_chip(), **placed)
    parts = jax.jit(make_parts_fn(trained.layout, placement))(*trained.state)
    given = (1, step, {"at": 3}, "run")
    return {host: copy_of(parts, trained.layout, placement, host, *given) for host in placement.hosts}


def rebuilt(copies: dict[int, Copy], choice: Source, outline: Outline) -> Vectors:
    """What `gather` does over processes: each brings what it was chosen for."""
    vectors = empty(outline)
    for process, copy in enumerate(copies.values()):
        collect(copy, choice, process, vectors)
    return vectors


def ranked(whole: OnHosts, held: list[list[Copy]]) -> list[Source]:
    return rank_sources([[copy.offer(whole.layout.copy_identity) for copy in copies] for copies in held])


@pytest.mark.parametrize("n_blocks", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_what_hosts_take_with_them_others_have(whole: OnHosts, n_blocks: int) -> None:
    """Every pair of hosts, and more: whole where the parts that are left say so, and then bit for bit."""
    everybody = copies_of(whole, n_blocks=n_blocks)
    rebuilt_for = {(0,), (5,), (1, 4), (0, 2, 5), (1, 2, 3, 4, 5, 6, 7)}
    spares = 8 // n_blocks - 1 if whole.kind == "replicated" else min(8 // n_blocks - 1, 1)
    whole_after: dict[int, list[bool]] = {}
    for lost in [*itertools.combinations(range(8), 1), *itertools.combinations(range(8), 2), *rebuilt_for]:
        copies = {host: copy for host, copy in everybody.items() if host not in lost}
        (source,) = ranked(whole, [[copy] for copy in copies.values()])
        assert (source.attempt, source.step) == (1, 7)
        assert not source.differs
        held = {part for copy in copies.values() for part in copy.parts}
        outline = everybody[0].outline
        assert source.is_whole == (held == set(range(outline.n_parts)))
        whole_after.setdefault(len(lost), []).append(source.is_whole)
        if source.is_whole and lost in rebuilt_for:
            again = rebuilt(copies, source, outline)
            assert bits(whole.layout.to_devices(read_vectors(again), whole.fresh)) == bits(whole.state)
    for n_lost, found in whole_after.items():
        assert all(found) or n_lost > spares
    if n_blocks == 1:
        # Four of the 28 pairs are keeper and kept: those that are half-way around.
        assert whole_after[2].count(False) == (4 if whole.kind != "replicated" else 0)
        assert all(whole_after[7]) == (whole.kind == "replicated")


def made_up(whole: OnHosts, attempt: int, step: int, halves: tuple[int, ...], run: str = "run") -> Copy:
    """A copy with the first or the second half of the parts, or both."""
    outline = replace(whole.layout.outline, n_shares=64)
    parts = [part for part in range(outline.n_parts) if 2 * part // outline.n_parts in halves]
    return Copy(attempt, step, outline, tuple(parts), [], None, whole.layout.copy_identity, run)


def test_sources_come_newest_first_and_later_attempts_before(whole: OnHosts) -> None:
    halves = [(0,), (1,)]
    # Step 9 is only half there; of the whole ones, the later attempt counts, although its step is the earlier.
    hosts = [[made_up(whole, 1, 8, halves[i]), made_up(whole, 2, 6, halves[i])] for i in range(2)]
    hosts[0].append(made_up(whole, 2, 9, halves[0]))
    found = ranked(whole, hosts)
    assert [(source.attempt, source.step, source.is_whole) for source in found] == [
        (2, 9, False),
        (2, 6, True),
        (1, 8, True),
    ]
    n_parts = found[1].n_parts
    assert found[1].holders == {part: [2 * part // n_parts] for part in range(n_parts)}
    assert ranked(whole, [[], []]) == []


def test_copies_of_one_step_but_of_two_runs_are_never_put_together(whole: OnHosts) -> None:
    # Two parts of a job that both took the other for dead have counted the same attempt and the same steps.
    hosts = [[made_up(whole, 2, 6, (0,), "one")], [made_up(whole, 2, 6, (1,), "other")]]
    found = ranked(whole, hosts)
    assert [source.is_whole for source in found] == [False, False]
    assert found[0].generation != found[1].generation


def test_copies_of_another_state_say_how_they_differ(whole: OnHosts) -> None:
    other = replace(made_up(whole, 1, 5, (0, 1)), identity=Identity((("params", "list"),)))
    (source,) = ranked(whole, [[other]])
    assert source.differs == "params: expected dict, got list"


def test_memory_keeps_two_whole_copies_and_trusts_no_damaged_one(whole: OnHosts, tmp_path: Path) -> None:
    memory = HostMemory(tmp_path)
    copy = copies_of(whole)[3]
    for step in range(5):
        memory.write(replace(copy, step=step))
    assert [found.step for found in memory.read()[0]] == [3, 4]
    newest = with_parts(memory.read()[0][-1])
    assert newest.outline == copy.outline
    assert newest.identity == copy.identity
    assert newest.run == "run"
    assert newest.parts == copy.parts
    assert newest.extra == {"at": 3}
    assert bits(newest.data) == bits(copy.data)
    path = tmp_path / newest.name
    good = path.read_bytes()
    for damaged, what in (
        (good[:-1], "expected .* bytes of state"),
        (good + b"x", "expected .* bytes of state"),
        (good[:200] + bytes([good[200] ^ 1]) + good[201:], "header checksum mismatch"),
        (b"else" + good, "first lines"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(RestartError, match=what):
            read_copy(path)
        assert [found.step for found in memory.read()[0]] == [3]
    # A header says nothing about the parts: those are looked at one by one.
    path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    with PartReader(read_copy(path)) as reader:
        for part in newest.parts:
            for which, (start, stop) in enumerate(newest.outline.slices(part)):
                is_damaged = start <= newest.n_bytes - 9 - newest.starts[part] < stop
                with pytest.raises(RestartError, match="state checksum mismatch") if is_damaged else nullcontext():
                    list(reader.blocks(part, which))


def test_copies_say_in_which_order_they_have_their_elements(whole: OnHosts, tmp_path: Path) -> None:
    """Copies that do not are older, and in the first of all orders; those of a later version are left alone."""
    memory, copy = HostMemory(tmp_path), copies_of(whole)[0]
    memory.write(copy)
    path = tmp_path / copy.name
    magic, line, rest = path.read_bytes().split(b"\n", 2)
    length = int(line.split()[0])
    facts, parts = json.loads(rest[:length]), rest[length:]
    assert facts["layout"] == LAYOUT

    def write(facts: dict[str, Any]) -> None:
        header = json.dumps(facts).encode()
        digest = hashlib.sha256(header).hexdigest()
        path.write_bytes(magic + f"\n{len(header)} {digest} -\n".encode() + header + parts)

    write({name: value for name, value in facts.items() if name != "layout"})
    assert bits(with_parts(read_copy(path)).data) == bits(copy.data)
    write({**facts, "layout": LAYOUT + 1})
    with pytest.raises(RestartError, match=rf"version {LAYOUT + 1}, expected at most {LAYOUT}: a newer meshmend"):
        read_copy(path)
    assert memory.read()[0] == []


def test_a_killed_writer_leaves_the_older_copies(whole: OnHosts, tmp_path: Path) -> None:
    memory = HostMemory(tmp_path)
    copy = copies_of(whole)[0]
    memory.write(copy)
    (tmp_path / "unfinished").write_bytes(b"half a copy")
    assert [found.step for found in memory.read()[0]] == [7]
    memory.write(replace(copy, step=8))
    assert [found.step for found in memory.read()[0]] == [7, 8]


def test_a_folder_that_cannot_be_written_is_reported(whole: OnHosts, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RestartError, match=r"cannot keep a copy of step 7: File exists.* MESHMEND_MEMORY"):
        HostMemory(tmp_path / "file").write(copies_of(whole)[0])


def test_what_a_restart_goes_back_behind_stays_until_all_hosts_have_written_a_newer_copy(
    whole: OnHosts, tmp_path: Path
) -> None:
    def kept() -> list[tuple[int, int]]:
        return [(found.attempt, found.step) for found in HostMemory(tmp_path).read()[0]]

    memory = HostMemory(tmp_path)
    copy = replace(copies_of(whole)[0], attempt=2)
    memory.pinned = frozenset({5})
    for step in (5, 6, 7):
        memory.write(replace(copy, step=step))
    memory.lock.release()
    again = HostMemory(tmp_path)
    again.go_back_to(2, 6)
    assert kept() == [(2, 5), (2, 6), (2, 7)]  # another restart may find step 7 whole
    again.write(replace(copy, attempt=3, step=7))
    # Some hosts may not have written it yet: the copy that the job has resumed from is still there, and one before it.
    assert kept() == [(2, 5), (2, 6), (2, 7), (3, 7)]
    again.write(replace(copy, attempt=3, step=8))
    assert kept() == [(3, 7), (3, 8)]
    again.clear()
    assert not tmp_path.exists()


def test_the_copy_that_all_hosts_have_is_not_lost_by_a_restart_from_one_that_some_lack(
    whole: OnHosts, tmp_path: Path
) -> None:
    """A simulated job lost it: step 6 was committed, 7 was not on all hosts, and a second host failed during 8."""
    copy = replace(copies_of(whole)[0], attempt=2)
    memory = HostMemory(tmp_path)
    for step in (5, 6, 7):
        memory.write(replace(copy, step=step))
    memory.lock.release()
    for attempt, expected in ((3, [6, 7, 8]), (4, [6, 7, 8, 9])):  # each fails during its second copy at the latest
        again = HostMemory(tmp_path)
        again.go_back_to(attempt - 1, attempt + 4)
        again.write(replace(copy, attempt=attempt, step=attempt + 5))
        assert [found.step for found in again.read()[0]] == expected
        again.lock.release()
    last = HostMemory(tmp_path)
    for step in (10, 11):
        last.write(replace(copy, attempt=5, step=step))
    assert [found.step for found in last.read()[0]] == [10, 11]


def test_a_copy_that_was_set_aside_is_one_to_resume_from(whole: OnHosts, tmp_path: Path) -> None:
    memory = HostMemory(tmp_path)
    copy = replace(copies_of(whole)[0], attempt=2)
    for step in (6, 7):
        memory.write(replace(copy, step=step))
    memory.go_back_to(2, 6)
    memory.go_back_to(2, 7)
    memory.write(replace(copy, attempt=3, step=8))
    assert [found.step for found in memory.read()[0]] == [7, 8]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ASIDE]


def test_where_there_is_no_room_for_a_copy_what_was_set_aside_goes(
    whole: OnHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostMemory(tmp_path)
    copy = replace(copies_of(whole)[0], attempt=2)
    for step in (6, 7):
        memory.write(replace(copy, step=step))
    memory.go_back_to(2, 6)
    write = os.pwrite

    def is_full(file: int, data: bytes, at: int) -> int:
        if any(path.suffix == ASIDE for path in tmp_path.iterdir()):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", is_full)
    memory.write(replace(copy, attempt=3, step=7))
    assert [(found.attempt, found.step) for found in memory.read()[0]] == [(2, 6), (3, 7)]


def test_only_one_part_of_a_job_goes_on(tmp_path: Path) -> None:
    one, other = Disk(tmp_path / "disk"), Disk(tmp_path / "disk")
    assert one.claimed() == 0
    one.hold_claim(1)
    one.hold_claim(1)
    with pytest.raises(RestartError, match="Another part of this job continues as attempt 1"):
        other.hold_claim(1)
    other.hold_claim(2)
    assert one.claimed() == 2
    with pytest.raises(RestartError, match="continues as attempt 2, while this one was attempt 1"):
        one.hold_claim(1)


def test_state_of_another_program_is_refused(whole: OnHosts, holed: OnHosts) -> None:
    if whole.kind == "replicated":
        pytest.skip("a replicated state fits any mesh")
    leaf = {"two-phase": r"state\[0\]\.trace\[0\]", "fsdp": r"params\['ends'\]\.shards\[0\]"}[whole.kind]
    expected = rf"not of the layout.*expected {leaf} float32\[.*\], got {leaf} float32\["
    with pytest.raises(RestartError, match=expected):
        holed.layout.check(*whole.state)
    holed.layout.check(*holed.fresh)


@pytest.mark.parametrize("block", [1 << 10, 1 << 13, 1 << 22])
@pytest.mark.parametrize("n_of_other", [1, pytest.param(200, marks=pytest.mark.slow), 511])
def test_a_host_takes_what_it_needs_of_all_slices(
    whole: OnHosts, monkeypatch: pytest.MonkeyPatch, block: int, n_of_other: int
) -> None:
    """Two hosts, of which the other one's rows are made by hand."""
    placement = place(whole.fabric, host_of_chip=[0] * 64)
    made = jax.jit(make_parts_fn(whole.layout, placement))(*whole.state)
    copy = copy_of(made, whole.layout, placement, 0, 1, 1, None, "")
    outline, rng = copy.outline, np.random.default_rng(0)
    data = [b"".join(array.tobytes() for array in arrays) for arrays in copy.data]
    assert copy.parts == tuple(range(outline.n_parts))
    assert [len(part) for part in data] == [outline.part_bytes(part) for part in copy.parts]
    slices = [(part, which) for part in copy.parts for which in range(len(outline.slices(part)))]
    of_other = {slices[i] for i in rng.permutation(len(slices))[:n_of_other]}
    words, sent = max(gathering.SMALLEST_ROW, block // 8), list[int]()
    most = max(len(slices) - len(of_other), len(of_other))
    longest = max(stop - start for part in copy.parts for start, stop in outline.slices(part))
    rounds = list(gathering.rounds_of(most, longest, words))

    def run(row: jax.Array) -> Any:
        """The same round as the other host sees it: as many bytes of each of its slices."""
        first, last, at, width = rounds[len(sent)]
        sent.append(row.nbytes)
        other = np.zeros(words * 4, np.uint8)
        for i, (part, which) in enumerate(sorted(of_other)[first:last]):
            start, stop = outline.slices(part)[which]
            piece = data[part][start + at : min(stop, start + at + width)]
            other[i * width : i * width + len(piece)] = np.frombuffer(piece, np.uint8)
        return jax.device_put(np.stack([np.asarray(row)[0], other.view(np.uint32)]), here)

    here = jax.devices()[0]
    monkeypatch.setattr(gathering, "row_words", lambda _: words)
    monkeypatch.setattr(gathering, "leaders_of", lambda _: (here, SimpleNamespace(process_index=1)))
    monkeypatch.setattr(gathering, "make_gather", lambda _: (run, None))
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda shape, how, arrays: arrays[0])
    parts = gathering.NeededParts(outline, whole.layout)
    gathering.gather(parts, {one: int(one in of_other) for one in slices}, lambda d, a, b: data[d][a:b])
    monkeypatch.undo()
    assert len(sent) == len(rounds)
    assert set(sent) == {words * 4}
    assert bits(whole.layout.to_devices(parts.needed, whole.fresh)) == bits(whole.state)


def test_only_slices_that_a_host_needs_and_lacks_are_wanted(whole: OnHosts, holed: OnHosts) -> None:
    layout, outline = holed.layout, replace(whole.layout.outline, n_shares=64)
    own = layout.needs()[: len(layout.needs()) // 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateLayout, "needs", lambda _: own)
        parts = gathering.NeededParts(outline, layout)
    has = [0, 5, 63]
    # The oracle: byte by byte.
    expected = set()
    parts_of_all = set(range(outline.n_parts))
    for part in parts_of_all - set(has):
        needed = np.zeros(outline.part_bytes(part), bool)
        for name, first, at, length in outline.byte_runs(part):
            for vector, start, stop in own:
                size = np.dtype(outline.vectors[vector][0]).itemsize
                if vector == name:
                    low, high = max(first, start * size), min(first + length, stop * size)
                    needed[at + low - first : at + high - first] |= low < high
        expected |= {(part, i) for i, (start, stop) in enumerate(outline.slices(part)) if needed[start:stop].any()}
    slices = [len(outline.slices(part)) for part in (0, outline.n_parts - 1)]
    source = Source(1, 7, "memory", "", "", outline.n_parts, outline.n_all_shares, (slices[0], slices[1]))
    assert {*wanted_slices(source, [parts.wanted(has)])} == expected
    assert {*wanted_slices(source, [parts.wanted(parts_of_all), parts.wanted(has)])} == expected
    assert wanted_slices(source, [parts.wanted(parts_of_all)]) == []


def test_what_was_read_for_the_last_time_is_not_kept(whole: OnHosts) -> None:
    needed = gathering.Needed(whole.layout)
    need = whole.layout.needs()[0]
    needed(*need)
    with pytest.raises(KeyError):
        needed(*need)


def test_arrays_that_were_donated_are_gone_one_after_the_other() -> None:
    trained = OnHosts((), "two-phase")
    like = jax.tree.map(jnp.copy, trained.fresh)
    alive: list[int] = []
    leaves = jax.tree.leaves(like)
    vectors = trained.vectors()

    def read(name: str, start: int, stop: int) -> Any:
        alive.append(sum(not leaf.is_deleted() for leaf in leaves))
        return vectors[name][start:stop]

    found = trained.layout.to_devices(read, like, donate=True)
    assert bits(found) == bits(trained.state)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert alive == sorted(alive, reverse=True)
    assert set(alive) == set(range(1, len(leaves) + 1))
