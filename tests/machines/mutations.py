"""Damage to descriptions of machines, at random."""

from __future__ import annotations

import random
import time

from meshmend.errors import LayoutError, MachineError
from meshmend.machines import machine_of, parse_description

PIECES = [
    "0",
    "-1",
    "99999999999999999999",
    "1e9",
    "null",
    "{}",
    "[]",
    "[[",
    "{{",
    '"',
    "'",
    ": ",
    "- ",
    "\n",
    "\t",
    "\x00",
]
PIECES += ["&a", "*a", "!!python/object/apply:os.system", "<<", "RING", "twisted", "4x4x4x4x4x4x4x4x4", "🦆", "%", "# "]


def mutated(text: str, rng: random.Random) -> str:
    """Cut, repeat, move, swap or replace some of it."""
    for _ in range(rng.randint(1, 4)):
        a, b = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        b = min(b, a + 200)
        how = rng.randrange(6)
        if how == 0:
            text = text[:a] + text[b:]
        elif how == 1:
            text = text[:b] + text[a:b] + text[b:]
        elif how == 2:
            text = text[:a] + rng.choice(PIECES) + text[a:]
        elif how == 3:
            text = text[:a] + rng.choice(PIECES) + text[b:]
        elif how == 4 and any(map(str.isdigit, text)):
            at = rng.choice([i for i, c in enumerate(text) if c.isdigit()])
            text = text[:at] + str(rng.randrange(100)) + text[at + 1 :]
        else:
            lines = text.split("\n")
            i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i]
            text = "\n".join(lines)
    return text


def attack(text: str, rounds: int, seed: str) -> int:
    """Read mutated descriptions; return how many were refused. Anything but the two errors is a failure."""
    rng, refused = random.Random(seed), 0
    for _ in range(rounds):
        damaged = mutated(text, rng)
        started = time.process_time()
        try:
            machine_of(parse_description(damaged, "mutated"))
        except (MachineError, LayoutError) as error:
            refused += 1
            if "\n" in str(error) or len(str(error)) > 2000:
                raise AssertionError(f"not one line: {error!r}") from error
        assert time.process_time() - started < 10
    return refused
