"""Every option that meshmend gives the TPU compiler, with the reason for it: nothing else names one.

libtpu changes its options from release to release. One that it does not know any more is an error when the step is
compiled (`compile.for_topology`), which names it; tests try each against the libtpu that is pinned.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CompilerOption:
    """One option of the TPU compiler, and why it is there: in every program, or only where steps overlap."""

    name: str
    value: str
    why: str
    only_overlap: bool = False


OPTIONS = (
    CompilerOption(
        "xla_max_concurrent_async_collective_permutes",
        "16",
        "By default at most five permutes are in flight at once, and chips of v4 and v5p have six links.",
    ),
    CompilerOption(
        "xla_tpu_enable_glp_ring_reordering",
        "false",
        "By default the v6e compiler fails on a collective among a part of the slice's chips. That is inside tiles of "
        "four or more as soon as one is missing, and between one chip of each host, as a state is restored from "
        "memory. Other generations accept the option and do not need it.",
    ),
    CompilerOption(
        "xla_tpu_use_aggressive_scheduling",
        "true",
        "By default the scheduler leaves unrolled permutes where they are, and nothing runs beside them.",
        only_overlap=True,
    ),
)
"""For the TPU compiler that is named in `TESTED_WITH`."""
TESTED_WITH = "libtpu 0.0.51"


def options_for(platform: str, *, overlap: bool) -> dict[str, str]:
    """Return the options as `jax.jit(…, compiler_options=…)` takes them; none but on TPUs.

    With `overlap` also those for communication that is to hide behind computing, as in `scan_layers`.
    """
    return {one.name: one.value for one in OPTIONS if platform == "tpu" and (overlap or not one.only_overlap)}


def dump_options(folder: Path) -> dict[str, str | bool]:
    """Return the options with which a compiler, of any platform, writes the compiled code to a folder."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def unknown_option(message: str) -> str | None:
    """Return the option that a compiler's error says it does not know, None where it says something else.

    >>> unknown_option("INVALID_ARGUMENT: No such compile option: 'xla_tpu_gone'")
    'xla_tpu_gone'
    """
    found = re.search(r"No such compile option: '?([\w.\-]+)", message)
    return None if found is None else found[1]


def without_option(name: str) -> str:
    """Return what to do about an option that the compiler does not know, and what it was for."""
    ours = [one for one in OPTIONS if one.name == name]
    if not ours:
        return "It is not one of meshmend's: leave it out of compiler_options."
    return (
        f"meshmend sets it for a reason: {ours[0].why} Install {TESTED_WITH}, with which it was tried, or leave the "
        "option out of your own compiler_options."
    )
