"""Replicas must agree: digests of a chip's state, and what follows from those of all chips.

A digest is a sum of words, each times an odd number of its place: integer arithmetic modulo 2⁶⁴, exact on every device.
A tensor's bits are taken as words of 32 bits (8 or 16 for narrower elements), in pieces of a million words.

*Any change of one word is noticed.* Let a word change from a to b. Words lie within −2³¹ … 2³¹ − 1, so their difference
d is not zero and less than 2³² in absolute value, and it is not zero modulo 2⁶⁴ either. The digest changes by d·m, m
being odd. Odd numbers have an inverse modulo 2⁶⁴, so d·m = 0 would mean that d = 0.

Changes to several words cancel only if Σ d·m = 0 modulo 2⁶⁴. The multipliers are the outputs of a mixing function, as
good as independent of each other and of the changes. No d is divisible by 2³², so whatever the other terms are, at most
one in 2³² of the odd multipliers of the last one makes the sum zero: so many of such changes are missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any

import torch

from meshmend.errors import Coordinate, ParameterError
from meshmend.quarantine import Sign, Suspect
from meshmend.quarantine.sign import DIGEST, MAX_SUSPECTS
from meshmend.torch.private import leaves_with_paths

PIECE = 2**20
"""Words of a piece, at most: digests cost nothing to send, and still say where in the state."""
BLOCK = 2**16
"""Words that are multiplied at a time: they fit into a core's cache."""
MAX_SIGNS = 8
"""Signs per chip: two are a verdict, and of a state that is wrong everywhere nobody reads a thousand."""


def pieces(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the pieces of all tensors of a state, each with its name."""
    leaves = [(_name(path), leaf) for path, leaf in leaves_with_paths(state) if isinstance(leaf, torch.Tensor)]
    for name, leaf in sorted(leaves, key=lambda one: one[0]):  # a dictionary has the order in which it was filled
        flat = _flat(name, leaf)
        size = PIECE * 4 // max(flat.element_size(), 4)  # wide elements have several words each
        for start in range(0, flat.numel(), size):
            stop = min(start + size, flat.numel())
            yield f"{name}, elements {start} to {stop - 1}", flat[start:stop]


def digest(piece: Annotated[torch.Tensor, "[S]"]) -> int:
    """Return the digest of a piece's bits, as a number of 64 bits.

    >>> digest(torch.tensor([1.0, 2.0])) == digest(torch.tensor([2.0, 1.0]))
    False
    """
    words = piece.view({1: torch.uint8, 2: torch.int16}.get(piece.element_size(), torch.int32))
    blocks = zip(words.split(BLOCK), _multipliers(str(words.device))[: len(words)].split(BLOCK), strict=True)
    sums = [block.to(torch.int64).mul_(odd).sum() for block, odd in blocks]
    return int(torch.stack(sums).sum()) % 2**64


def compare(told: Mapping[Coordinate, tuple[bool, bytes]], names: list[str], step: int) -> list[Sign]:
    """Return what the digests of all chips say, the same on every chip; none is how it should be.

    `told` has each chip's digests, eight bytes for each of `names`, and whether it has received its state from another
    chip since the last check. Those do not vote, and are named only if nobody else differs: they have what they were
    sent. Where no majority agrees, there is one sign against all of them, with `agree` 0: who is right remains open.
    """
    signs: list[Sign] = []
    found: Counter[Coordinate] = Counter()
    for number, name in enumerate(names):
        copies = {chip: word[8 * number : 8 * number + 8] for chip, (_, word) in told.items()}
        if len(set(copies.values())) == 1:
            continue
        old = {chip: copy for chip, copy in copies.items() if not told[chip][0]}
        voters = old if 2 * len(old) > len(copies) else copies
        ((value, times),) = Counter(voters.values()).most_common(1)
        has_majority = 2 * times > len(voters)
        if not has_majority:
            text = f"{name}: at most {times} of {len(voters)} chips agree, which is no majority"
            numbers = {"chunk": number, "agree": 0, "differ": len(voters)}
            suspects = tuple(Suspect.chip(chip) for chip in sorted(voters)[:MAX_SUSPECTS])
            return [Sign(DIGEST, suspects, step, text, numbers)]
        differing = [chip for chip, copy in sorted(voters.items()) if copy != value]
        differing = differing or [chip for chip, copy in sorted(copies.items()) if copy != value]
        text = f"{name}: {times} of {len(voters)} chips agree, and this one differs"
        numbers = {"chunk": number, "agree": times, "differ": len(differing)}
        for chip in differing:
            found[chip] += 1
            if found[chip] <= MAX_SIGNS:
                signs.append(Sign(DIGEST, (Suspect.chip(chip),), step, text, numbers))
    return signs


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ParameterError(f"{name} is not a dense tensor, so it has no digest: leave it out with Checks(own=…).")
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


@lru_cache(maxsize=4)
def _multipliers(device: str) -> torch.Tensor:
    """Return an odd number for each place of a piece: the outputs of SplitMix64, with the last bit set."""
    state = torch.arange(1, PIECE + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        state = (state ^ (state >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return (state | 1).to(device)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
