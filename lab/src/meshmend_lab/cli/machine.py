"""`meshmend lab machine`: the chips that a machine's own runtime uses, those that meshmend uses, and an all-reduce."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from meshmend.cli.common import mesh_facts, print_json
from meshmend.cli.options import IntendedOption, JsonOption, OptionalPayloadOption
from meshmend.cli.terminal import plain, print_line, print_rows, working
from meshmend.cost.units import format_bytes, name_seconds, parse_bytes
from meshmend.errors import ParameterError
from meshmend.planning.proven import DEFAULT_PAYLOAD_BYTES
from meshmend_lab.tenstorrent import RuntimeComparison, compare_with_runtime
from meshmend_lab.tenstorrent.numbered import read_numbered
from meshmend_lab.tenstorrent.runtime import PYTHON_VARIABLE


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A Tenstorrent cluster descriptor.")],
    intended: IntendedOption = None,
    payload: OptionalPayloadOption = None,
    json: JsonOption = False,
) -> None:
    """Compare the mesh that Tenstorrent's runtime opens on a machine with the one that meshmend plans for.

    The runtime's answer is measured for single chips and 2x2 boards of some machines; for others it is asked, where
    ttnn is installed.

    Example: meshmend lab machine today.yaml --intended healthy.yaml
    """
    payload_bytes = DEFAULT_PAYLOAD_BYTES if payload is None else parse_bytes(payload)
    machine = read_numbered(file, intended=intended)
    if not machine.devices:
        raise ParameterError(
            f"{file} is a {machine.format}, and only the runtime of Tenstorrent's machines is known. Give a cluster "
            f"descriptor."
        )
    with working("asking what is known of the runtime, and planning", json):
        compared = compare_with_runtime(machine, payload_bytes)
    if json:
        print_json({**mesh_facts(machine.mesh), "compare": _comparison_facts(compared, payload_bytes)})
    else:
        _show_comparison(compared, payload_bytes)


def _comparison_facts(compared: RuntimeComparison, payload_bytes: float) -> dict[str, Any]:
    return {
        "payload_bytes": payload_bytes,
        "runtime": _source(compared),
        "meshes": [
            {
                "who": row.who,
                "mesh": None if row.mesh is None else str(row.mesh),
                "chips": row.n_chips,
                "predicted_seconds": row.seconds,
            }
            for row in compared.rows
        ],
    }


def _source(compared: RuntimeComparison) -> str:
    """Say how the runtime's meshes are known, or why they are not."""
    if compared.answer is not None:
        return compared.answer.how
    return (
        f"not known: measured were single chips and 2x2 boards of some machines. Install ttnn beside meshmend, or name "
        f"a Python that has it: {PYTHON_VARIABLE}=/path/to/python."
    )


def _show_comparison(compared: RuntimeComparison, payload_bytes: float) -> None:
    print_rows(
        compared.rows,
        [
            ("who computes", lambda row: row.who),
            ("mesh", lambda row: "none opens" if row.mesh is None else str(row.mesh)),
            ("chips", lambda row: row.n_chips),
            (
                f"all-reduce of {format_bytes(payload_bytes)}",
                lambda row: None if row.seconds is None else name_seconds(row.seconds),
            ),
        ],
        names=2,
    )
    print_line(("the runtime's meshes: ", "dim"), plain(_source(compared)))
    print_line(("times: ", "dim"), "predicted, with meshmend's fastest plan on every mesh")
