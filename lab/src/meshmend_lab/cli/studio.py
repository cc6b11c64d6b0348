"""`meshmend lab studio`: a local web page to play with a machine."""

from __future__ import annotations

import socket
import webbrowser
from typing import Annotated

import typer

from meshmend.cli.common import print_json
from meshmend.cli.options import (
    HardwareOption,
    HoleOptions,
    JsonOption,
    MachineOptions,
    PayloadOption,
    PlannerOption,
    option,
)
from meshmend.cli.terminal import plain, print_line
from meshmend.cost import DEFAULT_HARDWARE
from meshmend.errors import LaunchError
from meshmend.launch.addresses import is_loopback, join_address, split_address
from meshmend.launch.addresses import listen as listen_at
from meshmend.launch.environment import check_address
from meshmend.planning import Auto
from meshmend_lab.extras import require
from meshmend_lab.studio import State

DEFAULT_PORT = 8737


def command(
    shape: Annotated[
        str | None,
        typer.Argument(metavar="[SHAPE]", help="Chips along each axis, as in 16x32. Default 8x8.", show_default=False),
    ] = None,
    *,
    machine: MachineOptions,
    holes: HoleOptions,
    payload: PayloadOption = "100MB",
    hardware: HardwareOption = None,
    planner: PlannerOption = Auto.name,
    listen: Annotated[
        str, option("--listen", "ADDR:PORT", "Where to listen; 0.0.0.0 for the whole network.")
    ] = f"127.0.0.1:{DEFAULT_PORT}",
    open_browser: Annotated[bool, option("--open", "", "Open the page in the browser.")] = False,
    json: JsonOption = False,
) -> None:
    """Serve a page to play with a machine: fail chips and cables, and see plan, proof and predicted time at once.

    The options say what the page shows first. It ends with Ctrl-C. Nothing is loaded from the network.

    Example: meshmend lab studio 16x32 --fail 4x2@6,8 --payload 1GB --hardware tpu-v6e
    """
    address, port = split_address(check_address(listen, "--listen", DEFAULT_PORT))
    require("starlette", "uvicorn", needed_for="meshmend lab studio", extra="studio")
    mesh = machine.mesh(shape if shape is not None or machine.machine is not None else "8x8", holes)
    chosen = machine.hardware(hardware) or DEFAULT_HARDWARE
    state = State.of(mesh, payload=payload, hardware=chosen, planner=planner)
    state.mesh, state.payload_bytes, state.made_planner()  # whatever is wrong with them is said here
    with _listening(address, port) as server:
        port = int(server.getsockname()[1])
        url = f"http://{join_address(address, port)}/#{state.fragment}"
        if json:
            print_json({"url": url, "address": address, "port": port})
        else:
            print_line(("meshmend lab studio", "bold"), f"  {plain(url)}")
            print_line(("Ctrl-C ends it.", "dim"))
            if not is_loopback(str(server.getsockname()[0])):
                print_line(("Everybody who can reach this address can use this machine to plan.", "yellow"))
        if open_browser:
            webbrowser.open(url)
        _serve(server, address)


def _listening(address: str, port: int) -> socket.socket:
    try:
        return listen_at(address, port)
    except OSError as error:
        why = f"{join_address(address, port)}: {error.strerror or error}"
        raise LaunchError(f"--listen {why}. Choose another port, or 0 for any that is free.") from None


def _serve(server: socket.socket, address: str) -> None:
    # Extras are imported by the commands that need them.
    import uvicorn

    from meshmend_lab.studio.server import make_app

    config = uvicorn.Config(
        make_app(address), log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=1
    )
    uvicorn.Server(config).run(sockets=[server])
