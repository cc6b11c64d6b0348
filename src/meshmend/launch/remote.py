"""A job as one of its hosts serves it beside its metrics: for those who do not see its shared folder."""

from __future__ import annotations

import json
import types
import urllib.error
import urllib.request
from dataclasses import fields
from http.client import HTTPException
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from meshmend.errors import LaunchError
from meshmend.launch.goodput import TimeAccount
from meshmend.launch.places import check_url
from meshmend.launch.watching import STATES, Look

WATCH_PATH = "/watch.json"
ANSWER_S = 10.0
MAX_ANSWER_BYTES = 64 << 20

_Facts = TypeVar("_Facts")


class RemoteWatch:
    """A job, by the address that its `--metrics` serve at, as in http://10.0.0.7:9464."""

    def __init__(self, url: str) -> None:
        checked = check_url(url, "The address of a job", "http://10.0.0.7:9464, for --metrics 10.0.0.7:9464")
        self.url = checked.rstrip("/").removesuffix("/metrics").removesuffix(WATCH_PATH)

    def look(self) -> Look:
        """Return the job as it is now. Raises `LaunchError` if nobody answers, or somebody else does."""
        try:
            with urllib.request.urlopen(self.url + WATCH_PATH, timeout=ANSWER_S) as answer:  # noqa: S310  # http(s)
                return read_look(json.loads(answer.read(MAX_ANSWER_BYTES)))
        except urllib.error.HTTPError as error:
            error.close()
            raise LaunchError(f"{self.url} answers {error.code}: what serves there is no job of meshmend.") from error
        except (OSError, HTTPException) as error:
            why = getattr(error, "reason", error)
            raise LaunchError(
                f"{self.url} does not answer ({getattr(why, 'strerror', None) or why}). The job serves there while it "
                "runs with --metrics, as long as that host lives; its shared folder can be watched at any time."
            ) from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LaunchError(f"{self.url} does not serve a job of this version of meshmend.") from error


def read_look(facts: Any) -> Look:
    """Return what `Look.facts` has written; raise `KeyError`, `TypeError` or `ValueError` if it is something else."""
    if facts["state"] not in STATES:
        raise ValueError(f"{facts['state']!r} is no state of a job")
    account = _read_all(TimeAccount, facts) if "began" in facts else None
    return _read_all(Look, {**facts, "account": None}, account=account)


def _read_all(kind: type[_Facts], facts: dict[str, Any], **known: Any) -> _Facts:
    """Make a dataclass from JSON by its own annotations, each value checked."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # dataclasses, all of them
    return kind(**{name: known[name] if name in known else _read(hints[name], facts[name]) for name in names})


def _read(hint: Any, value: Any) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(inner[0], value)
    if origin is tuple:
        return tuple(_read(inner[0], item) for item in list(value))
    if origin is dict:
        return {str(key): _read(inner[1], item) for key, item in dict(value).items()}
    if hint in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        return hint(value)
    if hint is str and isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _read_all(hint, value)
    raise TypeError(f"{value!r} is no {hint}")
