"""Names that moved out of `meshmend.jax` are still found there, with a warning that says where they are."""

from __future__ import annotations

import pytest

import meshmend.jax as mmj
from meshmend.jax.training import TrainStep


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in mmj._MOVED.items() for name in names])
def test_a_name_that_moved_is_found_with_a_warning(module: str, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"is meshmend\.jax\.{module}\.{name} now"):
        assert getattr(mmj, name) is not None
    assert name not in mmj.__all__


@pytest.mark.parametrize("name", mmj._REPLACED)
def test_a_name_that_was_replaced_is_found_with_a_warning(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"meshmend\.jax\.{name} is meshmend\.jax\."):
        assert getattr(mmj, name) is not None
    assert name not in mmj.__all__


def test_the_step_of_sharded_parameters_has_the_class_of_all_steps() -> None:
    with pytest.warns(DeprecationWarning, match=r"is meshmend\.jax\.training\.TrainStep now"):
        assert mmj.fsdp.ShardedTrainStep is TrainStep


def test_other_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match="no attribute 'checked_all_reduce'"):
        getattr(mmj, "checked_all_reduce")  # noqa: B009
