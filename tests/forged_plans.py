"""Saved plans whose headers say something else than was saved."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from meshmend import Schedule, save


def forge(path: Path, schedule: Schedule, *, drop: str | None = None, **facts: Any) -> Path:
    """Save a schedule as `path`, with facts of its header changed and one dropped."""
    save(schedule, path)
    with zipfile.ZipFile(path) as source:
        members = {name: source.read(name) for name in source.namelist()}
    header = json.loads(np.load(io.BytesIO(members["header.npy"])).tobytes()) | facts
    header.pop(drop, None)
    stream = io.BytesIO()
    np.save(stream, np.frombuffer(json.dumps(header).encode(), dtype=np.uint8))
    members["header.npy"] = stream.getvalue()
    with zipfile.ZipFile(path, "w") as target:
        for name, data in members.items():
            target.writestr(name, data)
    return path
