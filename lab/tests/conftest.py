"""Settings for all tests of the laboratory."""

from profiles import load_profile

load_profile()
