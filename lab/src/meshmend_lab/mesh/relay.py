"""A process that carries frames from one end of each cable to the other, a fixed time later: for kernels without netem.

It is run by its path, inside a lab's delay namespace, and imports nothing of meshmend: it starts at once and is small.
Frames are passed on as the kernel holds them: with PACKET_VNET_HDR, segments that are longer than the MTU and checksums
that are not filled in yet keep their description, so that no offload has to be turned off. The process ends when the
last cable has been removed, or its namespace.

    ip netns exec NAMESPACE python relay.py NAMESPACE SECONDS
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import socket
import sys
import time
from collections import deque
from pathlib import Path

ETH_P_ALL = 0x0003
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_RCVBUFFORCE = 33
RECEIVE_BYTES = 4 * 2**20
"""Of one cable end: what may arrive while this process waits for a core."""
FRAME_BYTES = 2**16 + 64
"""The longest segment, and its headers."""
BATCH = 64
"""Frames of one cable end that are read before the next one has its turn."""
LOOK_S = 0.5
"""How often it looks whether its namespace is still there."""


def main(namespace: str, delay_s: float) -> None:
    """Open the cable ends of this network namespace, leave a process in the background that serves them, and return."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ready = select.epoll()  # first, because `select` takes no descriptor above 1,023
    names = [name for _, name in socket.if_nameindex() if re.fullmatch(r"a\d+", name)]
    ends: dict[int, tuple[socket.socket, socket.socket]] = {}
    for name in names:
        a, b = _open(name), _open(f"b{name[1:]}")
        ends |= {a.fileno(): (a, b), b.fileno(): (b, a)}
    for number in ends:
        ready.register(number, select.EPOLLIN)
    if os.fork() == 0:
        _detach({ready.fileno(), *ends})
        try:
            _carry(ends, ready, delay_s, Path("/run/netns", namespace))
        finally:
            os._exit(0)


def _open(name: str) -> socket.socket:
    # Of no protocol until it is bound: else it would receive the frames of every interface until then.
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    with contextlib.suppress(OSError):  # Linux before 4.20; it spares us frames that another socket has sent
        end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BYTES)
    end.bind((name, ETH_P_ALL))
    return end


def _detach(keep: set[int]) -> None:
    """Let go of the terminal, the pipes and the lab's lock; be served before others, as waiting adds to the delay."""
    os.setsid()
    os.chdir("/")
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  # names are all that is needed
        if number not in keep:
            with contextlib.suppress(OSError):
                os.close(number)
    for _ in range(3):
        os.open(os.devnull, os.O_RDWR)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:  # some containers forbid it even to root
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)


def _carry(
    ends: dict[int, tuple[socket.socket, socket.socket]], ready: select.epoll, delay_s: float, namespace: Path
) -> None:
    # One delay for all, so the frames of all cables are due in the order in which they came.
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    look = 0.0
    while ends:
        now = time.monotonic()
        if now >= look:
            look = now + LOOK_S
            if not _is_ours(namespace):
                return
        while waiting and waiting[0][0] <= now:
            _, end, frame = waiting.popleft()
            with contextlib.suppress(
                OSError
            ):  # a cable that has gone, or a full queue: the frame is lost, as on any wire
                end.send(frame)
        until = min(waiting[0][0], look) if waiting else look
        # epoll itself counts in whole milliseconds.
        select.select([ready], [], [], max(0.0, until - time.monotonic()))
        for number, _ in ready.poll(0):
            if number not in ends:
                continue
            end, other = ends[number]
            try:
                for _ in range(BATCH):
                    waiting.append((time.monotonic() + delay_s, other, end.recv(FRAME_BYTES)))
            except BlockingIOError:
                pass
            except OSError:  # the interface has been removed, and its cable with it
                for each in (end, other):
                    del ends[each.fileno()]
                    each.close()


def _is_ours(namespace: Path) -> bool:
    """Whether the name still is that of the namespace that this process is in."""
    try:
        return os.path.samestat(namespace.stat(), Path("/proc/self/ns/net").stat())
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
