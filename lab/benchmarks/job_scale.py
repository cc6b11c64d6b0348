"""A job of 2,240 hosts, without its steps: what coordination costs at a start, after a failed host and at a checkpoint.

Run: python lab/benchmarks/job_scale.py [HOSTS ...], by default 8, 64, 512 and 2240

Light hosts (`store_scale`) join a real store; a process each of light workers stands for their own: all of them are
threads of this process, each with a client of its own of a real JAX coordination service in another process. They ask
the questions of the product's own protocol, in its order, with its own judges: what `initialize`, `Job` and `train`
ask, `recover` with the parts of a sharded state, and what a checkpoint asks. What stands in for the rest: a plan, a
compiled program and the values of a state are names here. The script fails beyond its limits: 10 s each for a start and
a recovery, 6 times as long with 2,240 hosts as with 512, 1 GB in the store and in the coordination service.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import store_scale
from meshmend.jax.compile.saved import why_not_loaded
from meshmend.jax.engine.private import KeyValueStore
from meshmend.jax.job.run import check_same_params, check_same_settings
from meshmend.jax.session import coordination
from meshmend.jax.session.coordination import Coordination
from meshmend.jax.session.session import judge_plan
from meshmend.jax.session.survivors import agree_on_quarantine
from meshmend.jax.state.recovery import Answer, Holder, StateSearch, recover
from meshmend.launch.hosts import Hosts
from meshmend.launch.processes import die_with_parent, free_port, raise_file_limit

CHIPS, SLICES = 4, 8
"""Chips of a host, each with shards of its own, and slices of a part."""
PLAN_BYTES = 30_000
LIMIT_S, LIMIT_MB, LIMIT_GROWTH = 10.0, 1000.0, 6.0
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no device is used
SHAPES = {8: "4x8", 64: "16x16", 200: "20x40", 512: "32x64", 2240: "80x112"}
"""Of machines with so many hosts of 2x2 chips, for the store."""
store_scale.SHAPES |= SHAPES


class Service:
    """JAX's coordination service, alone in a process. It ends with this one: its clients abort when it is gone."""

    def __init__(self, n: int) -> None:
        self.address = f"127.0.0.1:{free_port('127.0.0.1')}"
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", self.address, str(n)],
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        told = self.process.stdout.readline() if self.process.stdout else b""
        store_scale.check(told == b"ready\n", "the coordination service does not start")

    def peak_mb(self) -> float:
        """Return the most memory that it has used."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1e3


def serve(address: str, n: int) -> None:
    """Be the service, until this process is ended."""
    import jaxlib

    service = jaxlib._jax.get_distributed_runtime_service(address, n, heartbeat_timeout=600)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.pause()
    del service


@dataclass
class Worker:
    """A light process of the job: what it says, and what it has kept."""

    host: int
    client: Any
    mine: Coordination
    has: list[int] = field(default_factory=list)
    """Parts in this host's memory."""
    has_found: Answer = field(default_factory=dict)
    wants: str = ""
    """What it finds and wants, from `look`: two thousand real hosts find that side by side, before they tell it."""

    def look(self) -> None:
        """Look for what its memory has, and for what it lacks: the first slice of all shards of eight hosts.

        A new hole moves a part of them to other owners.
        """
        n_parts = CHIPS * (1 + max(self.host, self.mine.n_processes))
        offer = {
            "attempt": 1, "step": 7, "kind": "memory", "generation": "a generation", "differs": "",
            "slices": [SLICES, SLICES], "n_shares": 0, "n_parts": n_parts, "parts": self.has, "verified": -1,
            "run": "a run", "hosts": [[0, n_parts // CHIPS - 1]],
        }  # fmt: skip
        self.has_found = {
            "identity": "one model", "run": "a new run", "offers": [offer] if self.has else [], "problems": [],
            "claimed": 0, "untrusted": None, "start_over": 0, "room": [1 << 30, 0, "a machine"],
        }  # fmt: skip
        wants = np.zeros((n_parts, SLICES), bool)
        wants[(CHIPS * self.host + np.arange(8 * CHIPS)) % n_parts, 0] = True
        wants[self.has] = False
        self.wants = np.packbits(wants).tobytes().hex()

    def start(self) -> str:
        """Ask what a start asks; return what the recovery comes to."""
        ask = self.mine
        agree_on_quarantine(None, ask, Hosts.of("2x2", "2x2"))
        ask.tell(lambda: None)  # what was measured of the hardware
        mine = {
            "shared": "job-0123456789abcdef",
            "steps": 1000,
            "samples": 10**6,
            "batch": "KeepGlobal(8192)",
            "seed": 0,
        }
        plan = "plan " * 8 if self.host % 2 else ""  # each second host has it in its cache, as after compiling ahead
        told = ask.decide([mine, plan], partial(judge_plan, judge=check_same_settings, make=str))
        ask.send(told["sender"], lambda: b"p" * PLAN_BYTES, wants=not plan)
        store_scale.check(not ask.decide(["step.program", "content " * 8, ""], why_not_loaded), "not loaded")
        judge = StateSearch(
            range(ask.n_processes), 2, "/memory", lambda *_: 1, lambda _: {"outline": {}} if self.has else None
        )
        _, last = ask.run(
            recover(
                ask.process, judge, Holder(self.have, lambda _: {}, self.take, lambda _: {"why": "", "damaged": []})
            )
        )
        if last["do"] == "start":
            ask.decide("params " * 8, check_same_params)
        return str(last["do"])

    def save(self) -> None:
        """Ask what a checkpoint asks."""
        self.mine.decide("", lambda whys: next(filter(None, whys), ""))
        channel = self.mine.channel("save")
        channel.decide({}, lambda _: {})  # whether all reach the disk
        channel.exchange({"done": [(self.host + 1) % self.mine.n_processes]})  # to whom parts of chunks are sent
        channel.exchange({"done": None})

    def have(self) -> Answer:
        return self.has_found

    def take(self, _: Answer) -> Answer:
        return {"why": "", "damaged": [], "wants": self.wants, "extra": {"position": 7}}


class Workers:
    """The workers of one round, in threads."""

    def __init__(self, hosts: list[int], service: Service) -> None:
        import jaxlib

        self.calls: Counter[str] = Counter()
        """Calls of the coordination service by all, by kind."""
        self.local = threading.local()
        self.threads = ThreadPoolExecutor(len(hosts))
        make = partial(
            jaxlib._jax.get_distributed_runtime_client, service.address, init_timeout=300, heartbeat_timeout=600,
            shutdown_on_destruction=False, use_compression=True,
        )  # fmt: skip
        self.all = [Worker(host, make(i), Coordination(i, len(hosts))) for i, host in enumerate(hosts)]
        list(self.threads.map(lambda one: one.client.connect(), self.all))
        vars(coordination)["key_value_store"] = self.store
        # Of thousands of threads that want to go on, each would otherwise ask for its turn 200 times per second.
        sys.setswitchinterval(1.0)
        # All hear the same answer, which processes of their own would read side by side: here it is read once.
        vars(coordination)["read_fact"] = lru_cache(maxsize=64)(coordination.read_fact)

    def store(self) -> KeyValueStore:
        return KeyValueStore(Counted(self.local.client, self.calls))

    def run(self, do: Callable[[Worker], Any]) -> tuple[float, list[Any]]:
        """Let all do something at the same time; return how long it took, and what each returned."""

        def one(worker: Worker) -> Any:
            self.local.client = worker.client
            return do(worker)

        began = time.monotonic()
        found = list(self.threads.map(one, self.all))
        return time.monotonic() - began, found


class Counted:
    """A client of the coordination service that counts its calls."""

    def __init__(self, client: Any, calls: Counter[str]) -> None:
        self._client = client
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        self._calls[name] += 1
        return getattr(self._client, name)

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        self._calls["sets"] += 1
        self._calls["bytes"] += len(value)
        self._client.key_value_set_bytes(key, value)


def ask(n_hosts: int, hosts: list[int], *, keeps: bool) -> tuple[float, float, Counter[str], float]:
    """Return what a start and a checkpoint took, the calls of the start, and the service's memory."""
    service = Service(len(hosts))
    workers = Workers(hosts, service)
    for worker in workers.all:
        worker.mine.limit_s = 300.0
        if keeps:  # its own shards, and those of the host half of the way around
            owners = (worker.host, (worker.host + n_hosts // 2) % n_hosts)
            worker.has = sorted(CHIPS * owner + chip for owner in owners for chip in range(CHIPS))
        worker.look()
    gc.freeze()  # each of two thousand processes would collect its own garbage alone
    start_s, ends = workers.run(Worker.start)
    store_scale.check({*ends} == {"go" if keeps else "start"}, f"the start came to {Counter(ends)}")
    calls = Counter(workers.calls)
    save_s, _ = workers.run(Worker.save)
    return start_s, save_s, calls, service.peak_mb()


def round_of(n_hosts: int, *, lost: int | None = None) -> tuple[float, float, Counter[str], float]:
    """Do the same in a process of its own: clients of an earlier round would go on with their heartbeats."""
    words = [sys.executable, __file__, "--round", str(n_hosts), "" if lost is None else str(lost)]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=False, preexec_fn=die_with_parent)
    store_scale.check(done.returncode == 0, "a round did not come to its end")
    start_s, save_s, calls, service_mb = json.loads(done.stdout)
    return start_s, save_s, Counter(calls), service_mb


def measure(n: int) -> tuple[list[str], float, float]:
    """Return a row of the table for `n` hosts, and the times of the start and of the recovery."""
    with store_scale.store_process() as store, store_scale.Crowd(n, store.port) as crowd:
        joined_s = crowd.until(crowd.run_round(1), 60)
        crowd.die(n // 2)
        death_s = crowd.until(crowd.run_round(2), 60)
        store_mb = store.peak_mb()
    start_s, save_s, _, _ = round_of(n)
    recovery_s, _, calls, service_mb = round_of(n, lost=n // 2)
    sets, waits = calls["sets"] / (n - 1), calls["blocking_key_value_get_bytes"] / (n - 1)
    n_looks = calls["key_value_dir_get_bytes"]
    # Six questions, two messages each; what process 0 tells, and the plan where it is lacking; a few more by process 0.
    store_scale.check(sets <= 7 and waits <= 11, f"{sets:.1f} keys and {waits:.1f} waits per process, at most 7 and 11")
    store_scale.check(n_looks <= 20 * (1 + n // 10), f"process 0 has asked {n_looks} times for all facts")
    figures = [joined_s, death_s, start_s, recovery_s, save_s]
    row = [f"{n:,}", *(f"{one:.2f}" for one in figures), f"{sets:.1f}", f"{waits:.1f}"]
    row += [f"{calls['bytes'] / (n - 1) / 1e3:.1f}", f"{store_mb:.0f}", f"{service_mb:.0f}"]
    store_scale.check(
        max(store_mb, service_mb) < LIMIT_MB, f"{store_mb:.0f} and {service_mb:.0f} MB, at most {LIMIT_MB:g}"
    )
    return row, start_s, recovery_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", type=int, help="numbers of hosts", metavar="HOSTS")
    wanted = parser.parse_args().hosts or [8, 64, 512, 2240]
    if not SHAPES.keys() >= set(wanted):
        parser.error(f"HOSTS are some of {', '.join(map(str, SHAPES))}")
    raise_file_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 3 * max(wanted) + 100:
        parser.error(f"{max(wanted):,} hosts need more descriptors: ulimit -n {3 * max(wanted) + 1000}")
    times = "joined, s | next round, s | start, s | recovery, s | checkpoint, s"
    print(f"| hosts | {times} | keys | waits | kB sent | store, MB | coordinator, MB |")
    took: dict[int, float] = {}
    for n in wanted:
        row, start_s, took[n] = measure(n)
        print(f"| {' | '.join(row)} |", flush=True)
        store_scale.check(
            max(start_s, took[n]) < LIMIT_S,
            f"with {n} hosts coordination takes {start_s:.1f} s of a start and {took[n]:.1f} s of a recovery, "
            f"expected at most {LIMIT_S:g} s each",
        )
    if {512, 2240} <= took.keys():
        growth = took[2240] / took[512]
        store_scale.check(growth < LIMIT_GROWTH, f"2,240 hosts take {growth:.1f} times as long as 512")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["--round"]:
        raise_file_limit()
        n_hosts, lost = int(sys.argv[2]), sys.argv[3]
        here = [host for host in range(n_hosts) if str(host) != lost]
        print(json.dumps(ask(n_hosts, here, keeps=bool(lost))), flush=True)
        os._exit(0)  # clients of a service that has ended would log what they think of that
    else:
        main()
