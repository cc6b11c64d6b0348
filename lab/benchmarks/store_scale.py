"""Ten thousand hosts at one store: how long they take to join, to outlive a host, and to come back to a new store.

And what it costs the store to keep their events, while each of them does a step a second.

Run: python lab/benchmarks/store_scale.py [HOSTS ...], by default 100, 1000, 2240 (a v5p pod), 5000 and 10000

All of them take ten minutes on two cores that have nothing else to do, and 11,000 descriptors (`ulimit -n`). The
members here are light: they share one thread, and have no worker; of their agents they have the outbox. They speak the
protocol with the project's own messages, and follow the rules of `Member`: heartbeats every second, another connection
after one that breaks, and pauses in between. Where a host gives up, or a new store stops a round that runs, the script
fails.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meshmend.launch.delivery import BATCHES_PER_S, Outbox
from meshmend.launch.hosts import Hosts
from meshmend.launch.member import AGAIN_S
from meshmend.launch.membership import BEAT_S, SILENT_S, Message
from meshmend.launch.messages import (
    CHALLENGE_BYTES,
    MAX_BODY_BYTES,
    MAX_HELLO_BYTES,
    AuthenticatedChannel,
    MessageError,
    frame_bytes,
    make_key,
    make_nonce,
    pack,
    pack_hosts,
    read_challenge,
)
from meshmend.launch.processes import die_with_parent, free_port, raise_file_limit

SECRET, JOB = "swordfish", "job"
SHAPES = {100: "20x20", 200: "20x40", 1_000: "50x80", 2_240: "80x112", 5_000: "100x200", 10_000: "200x200"}
"""Of machines with so many hosts of 2x2 chips."""


def check(holds: bool, words: str) -> None:
    """End the script, if something does not hold."""
    if not holds:
        raise SystemExit(words)


def pauses() -> Iterator[float]:
    """Yield how long a host waits before each attempt to reach the store, as `Conversation.lose` says."""
    pause_s = AGAIN_S
    while True:
        yield pause_s * random.uniform(0.5, 1.5)  # noqa: S311  # nobody gains by guessing it
        pause_s = min(2 * pause_s, SILENT_S / 3)


@dataclass(eq=False, slots=True)
class Light:
    """A member without a thread."""

    host: int
    again: Iterator[float]
    connection: socket.socket | None = None
    channel: AuthenticatedChannel | None = None
    data: bytearray = field(default_factory=bytearray)
    is_admitted: bool = False
    gave_up: str = ""
    asked: Message | None = None
    number: int = 0
    name: str = ""
    hosts: tuple[int, ...] = ()
    """Of the round that it runs in; empty if it runs in none."""
    outbox: Outbox | None = None
    """Once it trains."""
    step: int = 0


class Crowd:
    """All members of a job but its workers, in one thread: call `until`, which lets them act."""

    def __init__(self, n: int, port: int) -> None:
        self.machine = Hosts.of(SHAPES[n], "2x2")
        self.members = [Light(host, pauses()) for host in range(n)]
        self.said: Counter[str] = Counter()
        """Messages of the store, and why connections ended."""
        self.sent: Counter[str] = Counter()
        self._port = port
        self._key = make_key(SECRET, JOB)
        self._selector = selectors.DefaultSelector()
        self._retries: list[tuple[float, int]] = [(0.0, host) for host in range(n)]
        self._beats = deque((time.monotonic() + BEAT_S * host / n, member) for host, member in enumerate(self.members))
        self._packed: tuple[tuple[int, ...], str] = (), ""

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            if member.connection is not None:
                member.connection.close()
        self._selector.close()

    def until(self, condition: Callable[[], bool], timeout_s: float) -> float:
        """Let all act until a condition is true; return how long that took."""
        began = time.monotonic()
        looked = 0.0
        while True:
            now = time.monotonic()
            if now >= looked + 0.02:  # to look at 10,000 members takes time, too
                looked = now
                if condition():
                    return now - began
                check(now - began < timeout_s, self.state())
            self._act(now)

    def wait(self, seconds: float) -> None:
        """Let all act for some time."""
        until = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > until, 2 * seconds + 60)

    def state(self) -> str:
        """Describe what has become of the members."""
        n_admitted = sum(member.is_admitted for member in self.members)
        return f"{n_admitted} of {len(self.members)} are admitted; {dict(self.said.most_common(12))}"

    def train(self) -> None:
        """Have each member that is alive do a step a second from now on, and say so."""
        for member in self.alive:
            member.outbox = Outbox(lambda message, member=member: self._send_message(member, message))  # type: ignore[misc]

    def _do_step(self, member: Light, outbox: Outbox) -> None:
        member.step += 1
        facts = {"job": JOB, "round": member.number, "host": member.host, "step": member.step, "chips": 8960}
        outbox.add({"at": time.time(), "event": "step", **facts, "loss": 1 / member.step, "waited_s": 0.001})
        outbox.add({"at": time.time(), "event": "kept", "step": member.step, "bytes": 12_345_678})
        outbox.tick(len(self.members))

    def die(self, host: int) -> None:
        """End a member as a power cut would: its kernel closes the connection, or nobody does."""
        self._close(self.members[host])
        self.members[host].gave_up = "killed"

    @property
    def alive(self) -> list[Light]:
        """Members that have not been killed."""
        return [member for member in self.members if member.gave_up != "killed"]

    def run_round(self, number: int) -> Callable[[], bool]:
        """Return whether all that are alive know that they run together."""

        def condition() -> bool:
            if any(member.number != number or not member.hosts for member in self.alive):
                return False
            check(self.alive[0].hosts == tuple(member.host for member in self.alive), "a round has lost hosts")
            return all(member.hosts == self.alive[0].hosts for member in self.alive)

        return condition

    def _act(self, now: float) -> None:
        while self._retries and self._retries[0][0] <= now:
            self._connect(self.members[heapq.heappop(self._retries)[1]])
        while self._beats[0][0] <= now:
            _, member = self._beats.popleft()
            self._send_message(member, {"type": "beat"})
            if member.outbox is not None:
                self._do_step(member, member.outbox)
            self._beats.append((now + BEAT_S, member))
        for selected, events in self._selector.select(0.005):
            member = selected.data
            connection: socket.socket | None = member.connection
            if connection is None or selected.fileobj is not connection:
                continue
            if events & selectors.EVENT_WRITE:
                self._selector.modify(connection, selectors.EVENT_READ, member)
            if events & selectors.EVENT_READ:
                self._read(member, connection)

    def _connect(self, member: Light) -> None:
        if member.gave_up:
            return
        member.connection = socket.socket()
        member.connection.setblocking(False)
        member.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        member.connection.connect_ex(("127.0.0.1", self._port))
        self._selector.register(member.connection, selectors.EVENT_READ, member)

    def _close(self, member: Light, why: str = "") -> None:
        if member.connection is not None:
            self._selector.unregister(member.connection)
            member.connection.close()
        if why:
            self.said[why] += 1
            heapq.heappush(self._retries, (time.monotonic() + next(member.again), member.host))
        member.connection = member.channel = None
        member.data, member.is_admitted = bytearray(), False
        if member.outbox is not None:
            member.outbox.on_lost()

    def _send_message(self, member: Light, message: Message) -> bool:
        if member.connection is None or member.channel is None:
            return False
        try:
            member.connection.sendall(member.channel.pack(message))
        except OSError as error:
            self._close(member, str(error))
            return False
        self.sent[message["type"]] += 1
        return True

    def _read(self, member: Light, connection: socket.socket) -> None:
        try:
            more = connection.recv(1 << 16)
        except OSError as error:
            self._close(member, str(error))
            return
        member.data += more
        try:
            if not more:
                raise ConnectionError("the connection was closed")
            if member.channel is None and len(member.data) >= CHALLENGE_BYTES:
                self._introduce(member, connection)
            while member.channel is not None and (size := frame_bytes(member.data, MAX_BODY_BYTES)) is not None:
                if len(member.data) < size:
                    break
                frame, member.data = member.data[:size], member.data[size:]
                self._take(member, member.channel.unpack(frame))
        except (OSError, MessageError) as error:
            self._close(member, str(error))

    def _introduce(self, member: Light, connection: socket.socket) -> None:
        theirs, mine = read_challenge(bytes(member.data[:CHALLENGE_BYTES])), make_nonce()
        del member.data[:CHALLENGE_BYTES]
        running = None
        if member.hosts:
            if member.hosts is not self._packed[0]:
                self._packed = member.hosts, pack_hosts(member.hosts)
            running = {"number": member.number, "name": member.name, "hosts": self._packed[1]}
        hello = {"host": member.host, "hosts": (1, len(self.members)), "machine": str(self.machine)}
        hello |= {"address": "127.0.0.1", "nonce": mine.hex(), "running": running, "number": member.number}
        connection.sendall(pack("hello to a store", hello, self._key, theirs, limit=MAX_HELLO_BYTES))
        member.channel = AuthenticatedChannel(self._key, mine, theirs, to="the store", of="a host")
        if not member.hosts:
            self._send_message(member, {"type": "join", "port": 7000})

    def _take(self, member: Light, message: Message) -> None:
        kind = message["type"]
        self.said[kind] += 1
        if kind == "refused":
            member.gave_up = message["why"]
            self._close(member)
            return
        if not member.is_admitted:
            member.is_admitted, member.again = True, pauses()
        if kind == "round":
            member.number, member.name, member.hosts = message["number"], message["name"], message["hosts"]
        elif kind == "have" and member.outbox is not None:
            member.outbox.on_have(message)
        elif kind in ("stop", "dropped"):
            member.hosts = ()
            self._send_message(member, {"type": "join", "port": 7000})


class StoreProcess:
    """`meshmend store` in a process of its own, as users start it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port("127.0.0.1")
        self.start()

    def written(self) -> int:
        """Return how many bytes of events it has kept."""
        return sum(path.stat().st_size for path in self.folder.glob("timeline/*"))

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "meshmend", "store", "--job", JOB),
                *("--listen", f"127.0.0.1:{self.port}", "--folder", str(self.folder)),
            ],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "MESHMEND_SECRET": SECRET},
            preexec_fn=die_with_parent,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def cpu_s(self) -> float:
        """Return the processor time that it has used."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        user, system = stat.rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def peak_mb(self) -> float:
        """Return the most memory that it has used."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1e3


@contextmanager
def store_process() -> Iterator[StoreProcess]:
    """Start a store, and do not wait for it: hosts do not, either."""
    with tempfile.TemporaryDirectory(prefix="meshmend-") as folder:
        store = StoreProcess(Path(folder))
        try:
            yield store
        finally:
            store.kill()


def measure(n: int) -> str:
    """Return a row of the table for `n` hosts."""
    with store_process() as store, Crowd(n, store.port) as crowd:
        joined_s = crowd.until(lambda: all(member.is_admitted for member in crowd.members), 60)
        round_s = joined_s + crowd.until(crowd.run_round(1), 60)
        # At rest.
        crowd.wait(5)
        began, used = time.monotonic(), store.cpu_s()
        crowd.wait(5)
        cpu = (store.cpu_s() - used) / (time.monotonic() - began)
        # A host dies.
        crowd.die(n // 2)
        death_s = crowd.until(crowd.run_round(2), 60)
        messages = crowd.said["stop"] + crowd.said["round"]
        peak_mb = store.peak_mb()
        # They train: the first step of each is news, what follows is routine.
        crowd.train()
        crowd.wait(5)
        seconds = max(10.0, 1.5 * n / BATCHES_PER_S)
        began, used, batches, written = time.monotonic(), store.cpu_s(), crowd.sent["events"], store.written()
        crowd.wait(seconds)
        took = time.monotonic() - began
        cpu_training = (store.cpu_s() - used) / took
        per_s, bytes_per_s = (crowd.sent["events"] - batches) / took, (store.written() - written) / took
        # The store dies.
        store.kill()
        died_at = time.monotonic()
        store.start()
        crowd.until(lambda: not any(member.is_admitted for member in crowd.members), 60)
        crowd.until(lambda: all(member.is_admitted for member in crowd.alive), 60)
        back_s = time.monotonic() - died_at
        crowd.wait(SILENT_S + 2)  # nobody is missed, and so nobody is stopped
        check(crowd.said["stop"] + crowd.said["round"] == messages == 3 * n - 2, crowd.state())
        crowd.die(n // 2 + 1)
        again_s = crowd.until(crowd.run_round(3), 60)
        peak_mb = max(peak_mb, store.peak_mb())
    check(not any(member.gave_up for member in crowd.alive), "a host has given up")
    check(joined_s < 60 and back_s < 60, f"joined in {joined_s:.1f} s, back in {back_s:.1f} s: 60 s are the limit")
    check(
        death_s < 3 and again_s < 3,
        f"the rounds after deaths took {death_s:.1f} and {again_s:.1f} s: 3 s are the limit",
    )
    check(peak_mb < 500, f"the store took {peak_mb:.0f} MB: 500 MB are the limit")
    check(per_s < 1.5 * BATCHES_PER_S, f"{per_s:.0f} batches a second: {1.5 * BATCHES_PER_S:.0f} are the limit")
    figures = [f"{joined_s:.1f}", f"{round_s:.1f}", f"{death_s:.1f}", f"{back_s:.1f}", f"{cpu:.2f}", f"{peak_mb:.0f}"]
    figures += [f"{per_s:.0f}", f"{cpu_training:.2f}", f"{bytes_per_s / 1e3:.0f}"]
    return f"| {n:,} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", type=int, help="numbers of hosts", metavar="HOSTS")
    wanted = parser.parse_args().hosts or list(SHAPES)
    if not SHAPES.keys() >= set(wanted):
        parser.error(f"HOSTS are some of {', '.join(map(str, SHAPES))}")
    raise_file_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < max(wanted) + 100:
        parser.error(f"{max(wanted):,} hosts need as many descriptors: ulimit -n {max(wanted) + 1000}")
    print(
        "| hosts | joined, s | first round, s | after a death, s | at a new store, s | CPU at rest | memory, MB "
        "| batches a second | CPU in training | events, kB/s |"
    )
    for n in wanted:
        print(measure(n), flush=True)


if __name__ == "__main__":
    main()
