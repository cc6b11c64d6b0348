"""What a seed says: how large a job is, how fast its parts are, and which faults come when."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

SPANS_S = (0.3, 1.0, 3.0, 9.0, 12.0, 25.0, 45.0)
"""How long faults last: some shorter than the product's limits, some longer."""
NEVER = 1 << 40
"""Steps of a job that ends when the faults have."""
KINDS = {
    "host killed": 8,
    "host switched off": 6,
    "host restarted without its memory": 4,
    "two hosts at once": 3,
    "domain switched off": 3,
    "host frozen": 4,
    "agent frozen": 3,
    "worker frozen": 3,
    "host cut off": 4,
    "host cut off one way": 4,
    "hosts cut off": 3,
    "connection reset": 4,
    "connection forgotten": 3,
    "messages late": 3,
    "store killed": 4,
    "store switched off": 2,
    "store moved": 1,
    "store paused": 4,
    "store suspended": 3,
    "disk full": 2,
    "disk hangs": 3,
    "disk loses its last write": 2,
    "copy damaged": 3,
    "clock jumps": 3,
    "store's clock jumps": 2,
    "worker fails": 6,
    "script raises on one host": 3,
    "host asked to leave": 2,
    "host slow": 3,
    "wrong numbers": 2,
    "halves apart": 1,
}
"""Faults that a job has to survive, and how often each comes."""
FATAL = {"script raises on every host": 1, "script asks for what cannot be": 1}
"""Faults that end a job: they come in few jobs, and late."""


@dataclass(frozen=True)
class Fault:
    """One fault. `at` is seconds from the start of the job."""

    at: float
    kind: str
    hosts: tuple[int, ...]
    seconds: float
    chance: float
    """What is left to chance in it, from 0 to 1."""

    def __str__(self) -> str:
        who = (
            "" if self.kind.startswith(("store", "disk", "messages")) else f" (host {', '.join(map(str, self.hosts))})"
        )
        return f"{self.kind}{who}, for {self.seconds:.1f} s"


@dataclass(frozen=True)
class Plan:
    """All that a seed decides before a job starts."""

    seed: int
    n_hosts: int
    least: int
    machine: str
    domains: tuple[str, ...]
    start_s: float
    max_restarts: int
    memory_every: int
    disk_every: int
    has_shards: bool
    n_blocks: int
    is_checked: bool
    latency_s: float
    step_s: float
    read_s: float
    write_s: float
    save_s: float
    fork_s: float
    slow_s: float
    state_wait_s: float
    total: int
    """Steps of the job; those that end amid faults have few."""
    last_moments: float
    """How likely something happens to each host when its worker has done the last step."""
    has_folder: bool
    """Whether the store keeps a folder that a store which is started again finds."""
    faults: tuple[Fault, ...] = field(repr=False)
    worker_s: float = 2.0
    """A worker takes up to 1.1 times this from its start until it has joined the others."""
    compile_s: float = 3.0
    """A round takes up to 1.07 times this from the restored state to its first step."""

    @property
    def hosts(self) -> tuple[int, int]:
        """Least and most hosts."""
        return self.least, self.n_hosts

    @property
    def fault_s(self) -> float:
        """When the last fault has come."""
        return max((fault.at for fault in self.faults), default=30.0) + 1.0


def draw(seed: int, *, n_hosts: int | None = None, n_faults: int = 50) -> Plan:
    """Draw a job from a seed: of 4 to 64 hosts, most of them small, or of just so many; with about so many faults."""
    rng = Random(f"plan {seed}")  # noqa: S311
    n = n_hosts or int(4 * 16 ** (rng.random() ** 3))
    machine = ""
    if n_hosts is None and rng.random() < 0.25:
        n = rng.choice([4, 6, 8, 12])
        machine = rng.choice([f"4x{2 * n} in hosts of 4x2", f"4x{n} in hosts of 2x2"])
    least = rng.choice([1, (n + 1) // 2, n // 2 + 1, n // 2 + 1, max(1, 3 * n // 4)])
    if rng.random() < 0.5 or n > 100:
        size = rng.randint(2, max(2, n // 3)) if n <= 100 else 16
        domains = tuple(f"rack {host // size}" for host in range(n))
    else:
        domains = ()
    has_shards = rng.random() < 0.6 or n > 100
    is_checked = rng.random() < 0.2
    is_fatal = rng.random() < 0.05
    kinds = [kind for kind in KINDS if rng.random() < 0.6 and (is_checked or kind != "wrong numbers")] or [
        "host killed"
    ]
    weights = [KINDS[kind] * (4 if kind == "wrong numbers" else 1) for kind in kinds]
    mean_s = rng.choice([2.0, 5.0, 9.0])
    count = max(1, round(n_faults * rng.uniform(0.6, 1.4)))
    faults, at = list[Fault](), rng.uniform(0.0, 60.0)
    for number in range(count):
        at += rng.expovariate(1 / mean_s)
        is_last = is_fatal and number == count - 1
        (kind,) = (rng.choice(list(FATAL)),) if is_last else rng.choices(kinds, weights)
        several = rng.randint(2, max(2, n // 2)) if kind == "hosts cut off" else 2 if kind == "two hosts at once" else 1
        hosts = tuple(rng.sample(range(n), min(n, several)))
        faults.append(Fault(at, kind, hosts, rng.choice(SPANS_S) * rng.uniform(0.5, 1.2), rng.random()))
    return Plan(
        seed=seed,
        n_hosts=n,
        least=least,
        machine=machine,
        domains=domains,
        start_s=rng.choice([30.0, 2.0]),
        max_restarts=10**6 if rng.random() < 0.9 else 3,
        memory_every=rng.choice([1, 2, 5, 0] if rng.random() < 0.2 else [1, 2, 5]),
        disk_every=rng.choice([0, 5, 20, 50]),
        has_shards=has_shards,
        n_blocks=n // 2 if n > 100 else rng.choice([1, 1, 2, 3]),
        is_checked=is_checked,
        latency_s=rng.choice([0.0005, 0.005, 0.05, 0.3]),
        step_s=rng.choice([0.5, 1.0, 3.0]),
        read_s=rng.choice([0.05, 0.5, 3.0]),
        write_s=rng.choice([0.05, 0.5, 3.0]),
        save_s=rng.choice([1.0, 10.0]),
        fork_s=rng.choice([0.1, 0.5]),
        slow_s=rng.choice([0.05, 0.5, 2.0]),
        state_wait_s=rng.choice([0.0, 30.0, 90.0]),
        total=rng.randint(10, 150) if rng.random() < 0.3 else NEVER,
        last_moments=rng.choice([0.0, 0.0, 0.1, 0.4]),
        has_folder=rng.random() < 0.8,
        faults=tuple(faults),
    )
