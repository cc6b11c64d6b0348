"""Network: what would keep this host from the others of a job, or the cables of wired hosts from their full rate."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from meshmend.cost import find_hardware
from meshmend.doctor.packages import Finding, Status
from meshmend.errors import MeshmendError
from meshmend.machines import Machine, read_machine
from meshmend.machines.description import Chip
from meshmend.topology import parse_chip

FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
PORTS = Path("/sys/class/net")
FAR_BELOW = 0.5
"""A port at less than this part of its nominal rate has negotiated another one: a bad plug, a wrong cable."""


def look_at_network() -> Iterator[Finding]:
    """Yield a finding for the host's name, and more for a host with cables, as MESHMEND_MACHINE and _CHIP say it."""
    file, chip = os.environ.get("MESHMEND_MACHINE"), os.environ.get("MESHMEND_CHIP")
    machine, host = None, None
    try:
        if file and chip:
            machine = read_machine(file)
            host = machine.chips.get(parse_chip(chip) if re.fullmatch(r"[\d,]+", chip) else machine.coordinate(chip))
    except MeshmendError as error:
        advice = "correct MESHMEND_MACHINE and MESHMEND_CHIP, or unset them"
        yield Finding("network", "machine", "broken", str(error), advice)
    is_wired = host is not None and bool(host.ports)
    yield _name(None if host is None else host.address, is_wired)
    if machine is not None and host is not None and is_wired:
        if len(host.ports) > 1:
            yield _forwarding(machine, host)
        yield from _links(machine, host)


def _name(address: str | None, is_wired: bool) -> Finding:
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError as error:
        found = f"nothing ({error})"
    if found[:1].isdigit() and not found.startswith("127."):
        return Finding("network", "host name", "works", f"{name} resolves to {found}")
    advice = f"with several hosts, write into /etc/hosts, before other lines of {name}: {address or '10.0.0.1'} {name}"
    why = "JAX on CPUs tells other hosts to connect there"
    status: Status = "broken" if is_wired else "absent"
    return Finding("network", "host name", status, f"{name} resolves to {found}: {why}", advice)


def _forwarding(machine: Machine, host: Chip) -> Finding:
    if FORWARDING.read_text(encoding="ascii").strip() != "0":
        return Finding("network", "forwarding", "works", "on")
    advice = f"meshmend machine {machine.file} --routes {host.name} | sudo sh -e"
    return Finding("network", "forwarding", "broken", "off: hosts behind this one cannot reach each other", advice)


def _links(machine: Machine, host: Chip) -> Iterator[Finding]:
    """Yield a finding per cable. The nominal rate is that of the machine's hardware, else of the fastest port."""
    # In Mbit/s; a driver that does not know it says −1.
    rates = {other: float(_read(port, "speed") or -1) for other, port in host.ports.items()}
    known = None if machine.hardware is None else find_hardware(machine.hardware)
    nominal = max(rates.values()) if known is None else known.link_bytes_per_s * 8e-6
    for other, port in host.ports.items():
        rate, name = rates[other], f"{port} to {other}"
        said = f"{rate:g} Mbit/s" if rate > 0 else "up, at an unknown rate"
        if _read(port, "carrier") != "1":
            yield Finding("network", name, "broken", "no signal", "look at the cable and at the port at its other end")
        elif 0 < rate < FAR_BELOW * nominal:
            advice = "plug the cable in again, or replace it"
            yield Finding("network", name, "broken", f"{said}, nominal {nominal:g}", advice)
        else:
            yield Finding("network", name, "works", said)


def _read(port: str, what: str) -> str:
    """Return what the kernel says of a port, nothing where it does not say it."""
    try:
        return (PORTS / port / what).read_text(encoding="ascii").strip()
    except OSError:
        return ""
