import pytest

from commandline import run, run_json
from meshmend.cost import predict
from meshmend.planning import plan
from meshmend.topology import Mesh
from meshmend_lab.paper.published import BYTES_PER_GRADIENT, CASES, HOLE, WORKLOADS
from meshmend_lab.paper.reproduce import FABRIC, Reproduction, reproduce

RATIOS = (1.56, 1.28, 1.28, 1.33)


@pytest.fixture(scope="module")
def found() -> Reproduction:
    return reproduce()


def test_the_papers_ratios_follow_from_its_table() -> None:
    assert tuple(round(case.ratio, 2) for case in CASES) == RATIOS


def test_the_papers_efficiency_follows_from_its_times() -> None:
    for case in CASES:
        ours = case.minutes / case.minutes_holed * case.chips / case.chips_holed
        assert ours == pytest.approx(case.efficiency, abs=0.02)


@pytest.mark.slow
def test_row_pairs_lose_less_to_the_hole_than_the_paper(found: Reproduction) -> None:
    for outcome, ratio in zip(found.outcomes, RATIOS, strict=True):
        assert 1 < outcome.ratio <= ratio
        assert outcome.overhead < outcome.overhead_holed <= outcome.case.overhead_holed + 0.001
        assert 0.98 < outcome.efficiency < 1


def test_only_full_meshes_are_fitted(found: Reproduction) -> None:
    hardware = found.hardware
    assert 0.5 * FABRIC.link_bytes_per_s < hardware.link_bytes_per_s <= FABRIC.link_bytes_per_s * 1.000001
    assert 1e-6 < hardware.step_latency_s < 2e-5
    assert hardware.hop_latency_s == FABRIC.hop_latency_s
    for outcome in found.outcomes:
        assert abs(outcome.residual) < 0.25
        assert outcome.compute_s + outcome.implied_s == pytest.approx(outcome.step_s)
    # No better pair of rate and latency nearby: the fit is at its optimum, or at the line rate.
    assert min(abs(outcome.residual) for outcome in found.outcomes) < 0.05


def test_times_are_predictions_of_proven_schedules(found: Reproduction) -> None:
    outcome = found.outcomes[0]
    payload = WORKLOADS[outcome.case.model].parameters * BYTES_PER_GRADIENT
    assert payload == 51.2e6
    for fail, timed in (((), outcome.full), ((HOLE,), outcome.holed)):
        mesh = Mesh(outcome.case.shape, failed=fail)
        schedule = plan(mesh, "row-pairs", orientation=timed.orientation, segments=timed.segments)
        assert schedule.n_steps == timed.steps
        assert predict(schedule, payload, found.hardware).seconds == pytest.approx(timed.seconds)


def test_every_input_has_a_source(found: Reproduction) -> None:
    assert all(name and value and len(source) > 15 for name, value, source in found.inputs)


def test_compute_times_can_be_given() -> None:
    given = reproduce(resnet_compute_s=29.5e-3, bert_compute_s=0.1, segments=(1,))
    resnet, bert = given.outcomes[1], given.outcomes[3]
    assert resnet.compute_s == pytest.approx(29.5e-3)
    assert bert.compute_s == pytest.approx(0.1)
    assert ("ResNet-50: compute on 1024 chips", "29.5 ms", "given by the caller") in given.inputs


def test_command_says_the_same(found: Reproduction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmend_lab.cli.paper.reproduce", lambda **_: found)
    facts = run_json("lab", "paper")
    assert [(case["model"], case["chips"], case["chips_holed"]) for case in facts["cases"]] == [
        ("ResNet-50", 512, 504),
        ("ResNet-50", 1024, 1016),
        ("BERT", 512, 504),
        ("BERT", 1024, 1016),
    ]
    for case, ratio in zip(facts["cases"], RATIOS, strict=True):
        assert round(case["paper"]["allreduce_ratio"], 2) == ratio
        assert case["no_slower_than_paper"] is True
    assert facts["fitted_hardware"]["link_bytes_per_s"] > 0
    shown = run("lab", "paper", "--resnet-compute", "29.5ms")
    for word in ("Table 2", "Table 1", "residual", "Inputs", "Fitted to the full-mesh columns only"):
        assert word in shown
