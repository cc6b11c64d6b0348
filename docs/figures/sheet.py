"""A picture as SVG: its parts on a card, in a style that follows the reader's theme."""

from __future__ import annotations


def sheet(width: int, height: int, parts: list[str], label: str, style: str) -> str:
    """Return the picture; `label` says in words what it shows."""
    card = f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{label}">\n<style>{style}</style>\n' + "\n".join([card, *parts]) + "\n</svg>\n"
    )
