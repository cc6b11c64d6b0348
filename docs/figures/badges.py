"""The badges of the README, from pyproject.toml: python docs/figures/badges.py

Our own, because the README's pictures may not come from other servers; one picture each, so that they wrap on a phone.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
HEIGHT, LETTER = 20, 6.3
STYLE = (
    "text { fill: #fff; font: 11px Verdana, DejaVu Sans, sans-serif; text-anchor: middle; } .name { fill: #555; } "
    ".value { fill: #1f6feb; } @media (prefers-color-scheme: dark) { .name { fill: #3d444d; } }"
)


def badges() -> list[tuple[str, str]]:
    """Return what the project says of itself: a name and a value each."""
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    extras = project["optional-dependencies"]
    (jax,) = (one.removeprefix("jax>=") for one in extras["jax"] if one.startswith("jax>="))
    (torch,) = (one.removeprefix("torch>=") for one in extras["torch"] if one.startswith("torch>="))
    return [
        ("Python", f"{pythons[0]} – {pythons[-1]}"),
        ("JAX", f"≥ {jax}"),
        ("PyTorch", f"≥ {torch}"),
        ("platform", "Linux"),
        ("licence", project["license"]),
    ]


def badge(name: str, value: str) -> str:
    """Return one badge."""
    parts, left = [], 0.0
    for text, kind in ((name, "name"), (value, "value")):
        width = LETTER * len(text) + 12
        parts.append(f'<rect class="{kind}" x="{left:.1f}" width="{width:.1f}" height="{HEIGHT}"/>')
        parts.append(f'<text x="{left + width / 2:.1f}" y="14">{text}</text>')
        left += width
    size = f'width="{left:.0f}" height="{HEIGHT}" viewBox="0 0 {left:.0f} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{name} {value}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def pictures() -> dict[Path, str]:
    """Return the badges by file."""
    return {HERE / f"badge-{name.lower()}.svg": badge(name, value) for name, value in badges()}


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")
