"""What several tests of the launcher use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launch.serving import Serving


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving() as one:
        yield one
