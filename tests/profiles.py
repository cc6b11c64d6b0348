"""How Hypothesis draws its examples, here and in the laboratory's tests.

The same examples on every run, however slow the machine; HYPOTHESIS_PROFILE=explore looks for new ones. A test that
says how many examples it wants gets that many, so exploring means to run it again and again.
"""

from __future__ import annotations

import os

from hypothesis import settings


def load_profile() -> None:
    """Take the profile that the environment names."""
    settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
    settings.register_profile("explore", deadline=None, derandomize=False, max_examples=1000, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
