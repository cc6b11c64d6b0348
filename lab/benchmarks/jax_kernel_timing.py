"""How long the kernel's instructions take, followed in order by one scalar core per chip. No TPU is timed.

The forecast (`mm.predict(…, mode="asynchronous")`) lets a chip send whatever is ready. A kernel follows a fixed list,
has so many slots per neighbour, and waits while it adds. This follows the lists themselves, with assumed costs:

  python lab/benchmarks/jax_kernel_timing.py [--instruction-us 0.1] [--hbm-gb-s 1600] [--slots 8] [--chips 64]

`--hbm-gb-s 0` leaves the additions out.
"""

from __future__ import annotations

from collections import deque

import meshmend as mm
from meshmend_lab.pallas.engine import as_the_kernel_drives
from meshmend_lab.pallas.instructions import Instructions, Kind, instructions_of
from tables import parser_of, up_to

PAYLOAD_BYTES, HARDWARE = 1e8, as_the_kernel_drives("tpu-v6e")


def seconds(made: Instructions, chunk_bytes: float, instruction_s: float, hbm_bytes_per_s: float) -> float:
    """Return when the last chip is done: a chip goes on until it must wait for something that has no time yet."""
    chunk_s, hop_s = chunk_bytes / HARDWARE.link_bytes_per_s, HARDWARE.hop_latency_s
    add_s = 3 * chunk_bytes / hbm_bytes_per_s if hbm_bytes_per_s else 0.0  # two reads and a write
    words, ports = made.words.tolist(), made.ports.tolist()
    now, at = [0.0] * len(words), [0] * len(words)
    times: dict[tuple[str, int, int, int], float] = {}
    link_free: dict[tuple[int, int], float] = {}
    waiting: dict[tuple[str, int, int, int], int] = {}
    todo = deque(range(len(words)))

    def happens(what: str, chip: int, port: int, slot: int, moment: float) -> None:
        times[what, chip, port, slot] = moment
        if (what, chip, port, slot) in waiting:
            todo.append(waiting.pop((what, chip, port, slot)))

    while todo:
        chip = todo.popleft()
        while at[chip] < len(words[chip]):
            word = words[chip][at[chip]][1]
            flags, kind = word >> 3, word & 7
            slot, run, port = flags >> 3 & 63, made.shape.sizes[flags >> 9 & 15], flags >> 18
            if kind in (Kind.SEND, Kind.RECEIVE):
                needs = ("credit" if kind == Kind.SEND else "arrival", chip, port, slot)
                if kind == Kind.RECEIVE or flags & 1:
                    if needs not in times:
                        waiting[needs] = chip
                        break
                    now[chip] = max(now[chip], times.pop(needs))
                now[chip] += instruction_s
                end = 0 if kind == Kind.SEND else 2
                other, theirs = ports[chip][end][port], ports[chip][end + 1][port]
                if kind == Kind.SEND:
                    done = max(now[chip], link_free.get((chip, port), 0.0)) + run * chunk_s
                    link_free[chip, port] = done
                    happens("arrival", other, theirs, slot, done + hop_s)
                else:
                    now[chip] += run * add_s if flags >> 2 & 1 else 0.0
                    if flags & 1:
                        happens("credit", other, theirs, slot, now[chip] + hop_s)
            at[chip] += 1
    return max(now)


def main() -> None:
    """Print both, in M/b."""
    parser = parser_of(__doc__)
    parser.add_argument("--instruction-us", type=float, default=0.1)
    parser.add_argument("--hbm-gb-s", type=float, default=0.0)
    parser.add_argument("--slots", type=int)
    options = parser.parse_args()
    (mesh,) = up_to(options.chips, [mm.Mesh("16x32", failed=["4x2@6,8"])])
    schedule = mm.plan(mesh, payload_bytes=PAYLOAD_BYTES, hardware=HARDWARE, mode="asynchronous")
    made = instructions_of(schedule, slots=options.slots)
    unit = PAYLOAD_BYTES / HARDWARE.link_bytes_per_s
    forecast = mm.predict(schedule, PAYLOAD_BYTES, HARDWARE, mode="asynchronous").seconds
    chunk_bytes = PAYLOAD_BYTES / schedule.total_chunks
    followed = seconds(made, chunk_bytes, options.instruction_us * 1e-6, options.hbm_gb_s * 1e9)
    print(f"{schedule!r}, {made.shape.slots} slots")
    print(f"forecast {forecast / unit:.3f} M/b, instructions in order {followed / unit:.3f} M/b")


if __name__ == "__main__":
    main()
