"""One slow cable: the least that it costs an all-reduce, on a mesh and behind a switch, as in docs/related.md.

    python lab/benchmarks/slow_cable.py

On the mesh it is `bound` with the slow cable and without it. Behind a switch, which is the setting of OptCC (Chen et
al., arXiv:2606.01680, 2026), it is the same machine of p chips, each with one cable to the switch, of which one keeps
the share r of its rate that the chip at the slow cable keeps of all its cables. The bound there is this file's own: for
every element, each of p − 1 contributions has to be received once on its way to a sum, and each of p − 1 chips has to
receive the result, so T · (p − 1 + r) ≥ 2 (p − 1) M/b; and the slow chip has to receive as much as the payload, so
T · r ≥ M/b. It has the two properties that OptCC's abstract states of theirs: from r = 1/2 on, the slow chip costs
O(1/p) of the healthy time; below, it is what everybody waits for.
"""

from __future__ import annotations

from fractions import Fraction

from meshmend import Mesh, bound


def cables(n: int) -> dict[str, tuple[str, int]]:
    """Return a cable in the middle and one at a corner of an n x n mesh, each with how many its first chip has."""
    half = n // 2
    return {"middle": (f"{half - 1},{half - 1}-{half - 1},{half}", 4), "corner": ("0,0-0,1", 2)}


def behind_a_switch(p: int, kept: Fraction) -> Fraction:
    """Return the least time of an all-reduce over p chips, one of which keeps a share of its rate, over the healthy."""
    return max(Fraction(2 * (p - 1)) / (p - 1 + kept), 1 / kept) / Fraction(2 * (p - 1), p)


def rows() -> list[str]:
    """Return the table, line by line."""
    heads = ["mesh, slow cable", "its rate", "bound, M/b", "at least", "its chip keeps", "behind a switch, at least"]
    found = ["| " + " | ".join(heads) + " |", "|---" + "|--:" * (len(heads) - 1) + "|"]
    for n in (8, 16):
        healthy = bound(Mesh((n, n))).units
        for place, (cable, n_cables) in cables(n).items():
            for rate in (Fraction(1, 2), Fraction(1, 4)):
                least = bound(Mesh((n, n), cable_rates={cable: rate})).units
                kept = (n_cables - 1 + rate) / n_cables
                cells = [f"{n}×{n}, {place}", str(rate), f"{least:.4f}", f"+{100 * (least / healthy - 1):.2f} %"]
                cells += [str(kept), f"+{100 * float(behind_a_switch(n * n, kept) - 1):.2f} %"]
                found.append("| " + " | ".join(cells) + " |")
    return found


if __name__ == "__main__":
    print("\n".join(rows()))
