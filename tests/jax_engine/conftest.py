"""JAX reads its device count once, when it is imported: 64 virtual CPU devices, before any test does that."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=64"
