"""Network: what would keep this host from the others of a job, or the cables of wired hosts from their full rate."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from meshmend.cost import find_hardware
from meshmend.doctor.packages import Finding
from meshmend.errors import MeshmendError
from meshmend.machines import read_machine
from meshmend.topology import parse_chip

FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
PORTS = Path("/sys/class/net")
FAR_BELOW = 0.5
"""A port at less than this part of its nominal rate has negotiated another one: a bad plug, a wrong cable."""


def look_at_network() -> Iterator[Finding]:
    """Yield a finding for the host's name, and more for a host with cables, as MESHMEND_MACHINE and _CHIP say it."""
    file, chip = os.environ.get("MESHMEND_MACHINE"), os.environ.get("MESHMEND_CHIP")
    host = None
    try:
        if file and chip:
            machine = read_machine(file)
            host = machine.chips.get(parse_chip(chip) if re.fullmatch(r"[\d,]+", chip) else machine.coordinate(chip))
    except MeshmendError as error:
        yield _broken("machine", str(error), "correct MESHMEND_MACHINE and MESHMEND_CHIP, or unset them")
    is_wired = host is not None and bool(host.ports)
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError as error:
        found = f"nothing ({error})"
    if found[:1].isdigit() and not found.startswith("127."):
        yield Finding("network", "host name", "works", f"{name} resolves to {found}")
    else:
        why = f"{name} resolves to {found}: JAX on CPUs tells other hosts to connect there"
        own = "10.0.0.1" if host is None or host.address is None else host.address
        advice = f"with several hosts, write into /etc/hosts, before other lines of {name}: {own} {name}"
        yield Finding("network", "host name", "broken" if is_wired else "absent", why, advice)
    if host is None or not is_wired:
        return
    if len(host.ports) > 1 and FORWARDING.read_text(encoding="ascii").strip() != "0":
        yield Finding("network", "forwarding", "works", "on")
    elif len(host.ports) > 1:
        advice = f"meshmend machine {file} --routes {host.name} | sudo sh -e"
        yield _broken("forwarding", "off: hosts behind this one cannot reach each other", advice)
    # In Mbit/s, −1 where a driver does not know it. The nominal rate is the machine's, else the fastest port's.
    rates = {other: float(_read(port, "speed") or -1) for other, port in host.ports.items()}
    known = None if machine.hardware is None else find_hardware(machine.hardware)
    nominal = max(rates.values()) if known is None else known.link_bytes_per_s * 8e-6
    for other, port in host.ports.items():
        rate, what = rates[other], f"{port} to {other}"
        said = f"{rate:g} Mbit/s" if rate > 0 else "up, at an unknown rate"
        if _read(port, "carrier") != "1":
            yield _broken(what, "no signal", "look at the cable and at the port at its other end")
        elif 0 < rate < FAR_BELOW * nominal:
            yield _broken(what, f"{said}, nominal {nominal:g}", "plug the cable in again, or replace it")
        else:
            yield Finding("network", what, "works", said)


def _broken(name: str, detail: str, advice: str) -> Finding:
    return Finding("network", name, "broken", detail, advice)


def _read(port: str, what: str) -> str:
    """Return what the kernel says of a port, nothing where it does not say it."""
    try:
        return (PORTS / port / what).read_text(encoding="ascii").strip()
    except OSError:
        return ""
