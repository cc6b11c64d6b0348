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
    "launch": r"meshmend (?:run|store)\b",
    "restart": r"mmj\.Job\b|meshmend\.jax\.state|train_through_failure",
    "tpu": r"meshmend compile\b|benchmarks/(?:jax_(?:fsdp|billion)|paper_workloads)",
    "jax": r"import jax\b|meshmend\.jax|examples/jax/|benchmarks/jax_|meshmend lab bench jax\b|meshmend_lab\.timing",
    "torch": r"meshmend\.torch|meshmend lab bench allreduce|(?:examples/|benchmarks/)torch",
    "draw": r"meshmend draw\b.* -o\b|mm\.draw\b|--plot\b",
    "machines": r"meshmend machine\b|meshmend\.machines|--machine\b",
}
"""What of a block's text tells that it needs an extra."""
LAB = {
    "": r"meshmend lab\b|meshmend_lab|lab/benchmarks/",
    "restart": r"meshmend lab bench restart\b",
    "workloads": r"lab/benchmarks/paper_workloads",
    "export": r"meshmend lab export\b",
}
"""What of it tells that it needs the laboratory, or an extra of it."""
INCLUDES = {
    "launch": {"restart", "jax"},
    "restart": {"jax"},
    "tpu": {"jax"},
}
CHECKOUT = re.compile(r"(?:benchmarks|docs|examples|tests)/\w|pip install '?\.")
FIRST = "index.md"
"""The first page says it in words, and has no room for more."""


def needs(body: str) -> str:
    """Return what a block needs, in a few words.

    >>> needs("sudo meshmend lab bench allreduce --lab 4x4; meshmend draw 4x4 -o steps.html")
    "needs root, pip install '.[draw,torch]' ./lab"
    """
    found = {extra for extra, tells in EXTRAS.items() if re.search(tells, body)}
    for extra in sorted(found):
        found -= INCLUDES.get(extra, set())
    what = ["a checkout"] if CHECKOUT.search(body) else []
    what += ["root"] if re.search(r"^sudo ", body, re.M) else []
    lab = [extra for extra, tells in LAB.items() if re.search(tells, body)]
    if (found or lab) and "pip install" not in body:
        words = [f"'.[{','.join(sorted(found))}]'" if found else "."]
        words += [f"'./lab[{lab[-1]}]'" if lab[-1] else "./lab"] if lab else []
        what.append(f"pip install {' '.join(words)}")
    return f"needs {', '.join(what)}" if what else ""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Give every block that needs something a title that says so."""

    def titled(found: re.Match[str]) -> str:
        title = f"not to paste alone: {found['reason']}" if found["reason"] else needs(found["body"])
        fence = f"```{found['kind']}\n"
        return found[0].replace(fence, f'```{found["kind"]} title="{title}"\n', 1) if title else found[0]

    return markdown if page.file.src_path == FIRST else FENCE.sub(titled, markdown)
