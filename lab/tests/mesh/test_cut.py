"""A cable without a signal: who answers over one hop, who over a detour, and from when on."""

from __future__ import annotations

import pytest

from meshmend import Mesh
from meshmend.launch import Chips
from meshmend.launch.cables import answering
from meshmend_lab.errors import LabError
from meshmend_lab.mesh import Lab
from namespaces import has_netem, needs_lab

HERE, THERE, FAR = (0, 0), (0, 1), (1, 1)


def ask(chip: tuple[int, ...], addresses: list[str]) -> tuple[set[str], set[str]]:
    del chip
    return answering(addresses), answering(addresses, hops=64)


def answers(lab: Lab) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Return which chips answer the first one over a cable alone, and over any way."""
    chip_at = {lab.address(chip): chip for chip in lab.namespaces if chip != HERE}
    with Chips(lab.enter) as chips:
        chips.start(HERE, ask, list(chip_at))
        alone, over_any = chips.results(30)[HERE]
    return {chip_at[address] for address in alone}, {chip_at[address] for address in over_any}


@needs_lab
@pytest.mark.parametrize("delay", [None, "2ms"])
def test_a_detour_answers_for_no_cable(delay: str | None) -> None:
    if delay is not None and not has_netem():
        pytest.skip("this kernel has no netem")
    everybody = {THERE, (1, 0), FAR}
    with Lab.temporary(Mesh("2x2"), rate="100mbit", delay=delay) as lab:
        assert answers(lab) == ({THERE, (1, 0)}, everybody)  # nobody listens there: to be refused is an answer
        left = lab.cut("0,0-0,1")
        assert left.mesh == Mesh("2x2", failed_cables=["0,0-0,1"])
        assert Lab.find(lab.name).mesh == left.mesh
        alone, over_any = answers(left)
        assert alone == {(1, 0)}
        assert THERE not in over_any, "routes are as before"
        left.renew()
        assert answers(left) == ({(1, 0)}, everybody)
        with pytest.raises(LabError, match="are not connected"):
            left.cut("1,0-1,1")
