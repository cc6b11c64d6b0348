"""A hook of the site: says above every block that is to be pasted what it needs besides `pip install .`.

What is not to be pasted alone says why: the reason is the one that tests/pages.py reads.
"""

from __future__ import annotations

import re
from typing import Any

FENCE = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)```(?P<kind>bash|python)\n(?P<body>.*?)^(?P=indent)```$",
    re.M | re.S,
)
EXTRAS = {
    "launch": r"meshmend (?:run|store|bench restart)\b",
    "restart": r"mmj\.Job\b|meshmend\.jax\.state|train_through_failure",
    "workloads": r"benchmarks/paper_workloads",
    "tpu": r"meshmend compile\b|benchmarks/jax_(?:fsdp|billion)",
    "export": r"meshmend export\b",
    "jax": r"import jax\b|meshmend\.jax|examples/jax/|benchmarks/jax_",
    "torch": r"meshmend\.torch|meshmend bench allreduce|(?:examples/|benchmarks/)torch",
    "draw": r"meshmend draw\b|mm\.draw\b|--plot\b|--figure\b",
    "availability": r"meshmend (?:availability|report)\b|meshmend\.availability",
    "machines": r"meshmend machine\b|meshmend\.machines|--machine\b",
}
"""What of a block's text tells that it needs an extra."""
INCLUDES = {
    "launch": {"restart", "jax"},
    "restart": {"jax"},
    "workloads": {"tpu", "jax"},
    "tpu": {"jax"},
    "export": {"jax"},
}
CHECKOUT = re.compile(r"(?:benchmarks|docs|examples|tests)/\w|pip install '?\.")
FIRST = "index.md"
"""The first page says it in words, and has no room for more."""


def needs(body: str) -> str:
    """Return what a block needs, in a few words.

    >>> needs("sudo meshmend bench allreduce --lab 4x4; meshmend compare 4x4 --payload 1MB --plot times.svg")
    "needs root, pip install '.[draw,torch]'"
    """
    found = {extra for extra, tells in EXTRAS.items() if re.search(tells, body)}
    for extra in sorted(found):
        found -= INCLUDES.get(extra, set())
    what = ["a checkout"] if CHECKOUT.search(body) else []
    what += ["root"] if re.search(r"^sudo ", body, re.M) else []
    if found and "pip install" not in body:
        what.append(f"pip install '.[{','.join(sorted(found))}]'")
    return f"needs {', '.join(what)}" if what else ""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Give every block that needs something a title that says so."""

    def titled(found: re.Match[str]) -> str:
        title = f"not to paste alone: {found['reason']}" if found["reason"] else needs(found["body"])
        fence = f"```{found['kind']}\n"
        return found[0].replace(fence, f'```{found["kind"]} title="{title}"\n', 1) if title else found[0]

    return markdown if page.file.src_path == FIRST else FENCE.sub(titled, markdown)
