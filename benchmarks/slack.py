"""Plans with slack beside those without, for an engine that waits for its data alone. All times are predicted.

    python benchmarks/slack.py            # --message 50 adds what a chip pays for each message, in nanoseconds
    python benchmarks/slack.py --chips 64 --payload 1MB

Links of TPU v6e, 1 µs per hop. The unit is M/b, the payload over the rate of a link.
"""

from __future__ import annotations

import time
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from meshmend import Mesh, Schedule, plan, verify
from meshmend.cost import Hardware, find_hardware, predict
from meshmend.cost.units import format_bytes, parse_bytes
from tables import parser_of, up_to

CASES = {
    Mesh("8x8", failed=["2x2@2,2"]): (1e6, 1e7, 1e8, 1e9),
    Mesh("16x32", failed=["4x2@6,8"]): (1e6, 1e7, 1e8, 1e9),
    Mesh("4x4x4", wrap=True): (1e6, 1e7, 1e8),
}


def main() -> None:
    """Print a row for each mesh and payload."""
    parser = parser_of(__doc__)
    parser.add_argument("--message", type=float, default=0.0, help="nanoseconds per message")
    parser.add_argument("--payload", type=parse_bytes, help="only this one, as in 1MB")
    options = parser.parse_args()
    hardware = replace(find_hardware("tpu-v6e"), name="v6e", message_s=1e-9 * options.message)
    console = Console(width=140)
    console.print(str(hardware))
    table = Table("mesh", "payload", "no slack", "with slack", "at least", "plan", "kB per message", "CPU s", box=None)
    for mesh in up_to(options.chips, list(CASES)):
        for payload in [options.payload] if options.payload else CASES[mesh]:
            before = plan(mesh, payload_bytes=payload, hardware=hardware)
            began = time.process_time()
            after = plan(mesh, payload_bytes=payload, hardware=hardware, mode="asynchronous", verify=False)
            took = time.process_time() - began
            verify(after)
            unit = payload / hardware.link_bytes_per_s
            least = predict(after, payload, hardware, mode="asynchronous").least_seconds / unit
            figures = [f"{units(one, payload, hardware):.3f}" for one in (before, after)]
            kilobytes = payload / after.total_chunks / 1e3
            what = f"{after.planner}, {after.total_chunks:,} chunks"
            row = (*figures, f"{least:.3f}", what, f"{kilobytes:.0f}", f"{took:.1f}")
            table.add_row(str(mesh), format_bytes(payload), *row)
    console.print(table)


def units(schedule: Schedule, payload_bytes: float, hardware: Hardware) -> float:
    """Return the asynchronous time in units of M/b."""
    seconds = predict(schedule, payload_bytes, hardware, mode="asynchronous").seconds
    return seconds * hardware.link_bytes_per_s / payload_bytes


if __name__ == "__main__":
    main()
