"""The rule of `slots`, in plain Python: to be read before it. Tests hold the packed arrays to it, transfer by transfer.

A transfer is (way, chunk, rank): `rank`'s way up to its parent in the chunk's tree, or its way down from there. Every
link has a queue of transfers. In each step:

1. A way up may go once all of the chip's children have gone up. A way down may go once the parent's way down has gone;
   the root's children may go down once all of them have gone up.
2. Each link offers, of its transfers that may go, the one nearest the front of its queue.
3. A chip takes a chunk from one child per step (backwards in time: hands it to one child per step). Of siblings that
   meet, the one on the highest-numbered link goes, unless others are nearer the front of their queues: then the
   highest-numbered link among those.
4. A link that lost offers its next transfer instead, if that lies in the same 64 places of its queue and has no
   sibling that it could meet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

WORD = 64
Transfer = tuple[str, int, int]


class Reference:
    """Trees and links, as dictionaries."""

    def __init__(self, parent: NDArray[np.int32], links: Mapping[tuple[int, int], int]) -> None:
        self.parent = {
            (chunk, rank): int(up) for chunk, row in enumerate(parent) for rank, up in enumerate(row) if up >= 0
        }
        self.children: dict[tuple[int, int], list[int]] = defaultdict(list)
        for (chunk, rank), up in self.parent.items():
            self.children[chunk, up].append(rank)
        self.links = links

    def link(self, transfer: Transfer) -> int:
        """Return the link that a transfer crosses."""
        way, chunk, rank = transfer
        ends = (rank, self.parent[chunk, rank])
        return self.links[ends if way == "up" else ends[::-1]]

    def may_meet(self, transfer: Transfer, way: str) -> bool:
        """Whether a transfer could meet a sibling's in this `way`."""
        return transfer[0] == way and len(self.children[transfer[1], self.parent[transfer[1:]]]) > 1

    def run(self, position: Mapping[Transfer, int], backwards: bool) -> list[set[Transfer]]:
        """Return the transfers of each step; `position` is each one's place in its link's queue."""
        way = "down" if backwards else "up"
        left, gone, steps = set(position), set[Transfer](), list[set[Transfer]]()
        while left:
            offers: dict[int, list[Transfer]] = defaultdict(list)
            for transfer in left:
                if self._may_go(transfer, gone):
                    offers[self.link(transfer)].append(transfer)
            for queue in offers.values():
                queue.sort(key=position.__getitem__)
            going = {link: offers[link][0] for link in sorted(offers)}
            families: dict[tuple[int, int], list[int]] = defaultdict(list)
            for link, (offered, chunk, rank) in going.items():
                if self.may_meet((offered, chunk, rank), way):
                    families[chunk, self.parent[chunk, rank]].append(link)
            for family in families.values():
                winner = family[-1]
                nearer = [link for link in family if position[going[link]] < position[going[winner]]]
                winner = nearer[-1] if nearer else winner
                for link in family:
                    if link != winner:
                        first, *rest = offers[link]
                        same_word = [other for other in rest if position[other] // WORD == position[first] // WORD]
                        del going[link]
                        if same_word and not self.may_meet(same_word[0], way):
                            going[link] = same_word[0]
            if not going:
                raise AssertionError("no transfer can go although some are left: this is a bug in meshmend")
            steps.append(set(going.values()))
            gone |= steps[-1]
            left -= steps[-1]
        return steps

    def _may_go(self, transfer: Transfer, gone: set[Transfer]) -> bool:
        way, chunk, rank = transfer
        if way == "up":
            return all(("up", chunk, child) in gone for child in self.children[chunk, rank])
        above = self.parent[chunk, rank]
        if (chunk, above) in self.parent:
            return ("down", chunk, above) in gone
        return all(("up", chunk, child) in gone for child in self.children[chunk, above])
