"""The options that commands of the laboratory share."""

from __future__ import annotations

from typing import Annotated

import typer

LinkRateOption = Annotated[str, typer.Option("--rate", metavar="RATE", help="Rate of a link, as tc writes it.")]
LinkDelayOption = Annotated[
    str | None,
    typer.Option("--delay", metavar="TIME", help="Delay of a link, one way, as tc writes it.", show_default="none"),
]
