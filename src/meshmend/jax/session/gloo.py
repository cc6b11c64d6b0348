"""Where Gloo listens: it carries what CPU devices of different processes send each other.

Left to itself, it takes the address that the machine's name resolves to. On Debian that is 127.0.1.1, so that jobs on
several machines never start; elsewhere it may be an address of a network that the job is to stay out of. The launcher
knows under which address the other hosts reach this one, so Gloo listens there.
"""

from __future__ import annotations

import socket
import sys

from meshmend.errors import VersionError
from meshmend.jax.engine.private import coordinator_address, use_gloo_at
from meshmend.launch.addresses import is_loopback, split_address
from meshmend.launch.environment import Launch


def listen_where_reached(launch: Launch) -> None:
    """Have Gloo listen where the other hosts reach this one; write a line with what to do if they will not reach it.

    Call it after `jax.distributed.initialize`, before anything touches a device.
    """
    name, why = launch.address, ""
    if name:
        try:
            use_gloo_at(name)
        except (VersionError, RuntimeError, TypeError) as error:
            name, why = "", f" ({str(error).splitlines()[0]})"
    name = name or socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return  # Gloo says so
    others = split_address(coordinator_address() or "localhost", 0)[0]
    if launch.n_processes > 1 and is_loopback(str(found)) and not is_loopback(others):
        address = launch.address if why else "the address under which the other hosts reach this one"
        sys.stderr.write(
            f"No other host reaches this one: {name} resolves to {found} here, and Gloo listens there{why}. Let {name} "
            f"stand for {address} in /etc/hosts.\n"
        )
