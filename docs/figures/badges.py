"""The badges of the README, from pyproject.toml: python docs/figures/badges.py

One picture, because the README's pictures may not come from other servers.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
HEIGHT, GAP, LETTER = 20, 6, 6.3


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


def picture() -> str:
    """Return the picture."""
    parts, left = [], 0.0
    for name, value in badges():
        widths = [LETTER * len(text) + 12 for text in (name, value)]
        for text, at, width, fill in zip(
            (name, value), (left, left + widths[0]), widths, ("#555", "#1f6feb"), strict=True
        ):
            parts.append(f'<rect x="{at:.1f}" width="{width:.1f}" height="{HEIGHT}" fill="{fill}"/>')
            parts.append(f'<text x="{at + width / 2:.1f}" y="14" text-anchor="middle">{text}</text>')
        left += sum(widths) + GAP
    said = "; ".join(f"{name} {value}" for name, value in badges())
    size = f'width="{left - GAP:.0f}" height="{HEIGHT}" viewBox="0 0 {left - GAP:.0f} {HEIGHT}"'
    style = 'fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{said}"><g {style}>'
    return "\n".join([head, *parts, "</g></svg>\n"])


if __name__ == "__main__":
    (HERE / "badges.svg").write_text(picture(), encoding="utf-8")
