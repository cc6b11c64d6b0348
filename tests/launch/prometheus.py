"""A Prometheus that scrapes a job's metrics, where one is installed."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples/operate"


needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed: apt-get install prometheus"
)


def ask(port: int, query: str) -> list[dict[str, Any]]:
    address = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(address, timeout=10) as answer:
        return list(json.load(answer)["data"]["result"])
    return []
