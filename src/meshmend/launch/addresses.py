"""Addresses and ports: how they are written and read, IPv6 included, and how a server listens there.

An IPv6 address stands in brackets where a port follows, as in [fd00::7]:29400. Everything else in meshmend has the
host without brackets and the port as a number, and writes them with `join_address`.
"""

from __future__ import annotations

import ipaddress
import socket


def split_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Return the host, without brackets, and the port; raise ValueError if it is no address with a port.

    An IPv6 address without brackets has no port: its last group would be taken for one.

    >>> split_address("[fd00::7]:5000"), split_address("node7:5000"), split_address("fd00::7", 29400)
    (('fd00::7', 5000), ('node7', 5000), ('fd00::7', 29400))
    """
    has_port = ":" in text and not text.endswith("]") and not _is_ipv6(text)
    host, port = text.rpartition(":")[::2] if has_port else (text, str(default_port))
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        is_host = _is_ipv6(host)
    else:
        is_host = bool(host) and (":" not in host or not has_port)
    if not is_host or not (port.isascii() and port.isdecimal()) or int(port) >= 1 << 16:
        raise ValueError(f"{text!r} is no address with a port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return an address and a port as one text.

    >>> join_address("fd00::7", 29400), join_address("10.0.0.7", 29400)
    ('[fd00::7]:29400', '10.0.0.7:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach an address.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.7"), is_loopback("node7")
    (True, True, False, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of a server's address; of a name that has both kinds, IPv4."""
    families = {found[0] for found in socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM)}
    return socket.AF_INET if socket.AF_INET in families else socket.AF_INET6


def listen(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Return a server's socket. At "::" it also takes IPv4 connections, where the system can."""
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family_of(host), backlog=backlog, dualstack_ipv6=both)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
