"""The server: what it answers, what it refuses, and that no other web site or path gets past it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

import meshmend as mm
from meshmend.cost import Hardware
from meshmend.cost.hardware import write_hardware
from meshmend.planning.auto import CHOICES
from meshmend_lab.studio import workers
from meshmend_lab.studio.server import MAX_QUESTION_BYTES, PAGE, make_app
from meshmend_lab.studio.state import State
from meshmend_lab.studio.workers import AnswerProcesses, NoAnswerError

SMALL = {"shape": "4x4", "fail": ["2x2@0,0"], "payload": "1MB", "hardware": "tpu-v6e"}


@pytest.fixture(scope="module")
def studio() -> Iterator[TestClient]:
    with TestClient(make_app(), base_url="http://127.0.0.1:8737") as client:
        yield client


def lines(response: httpx2.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def refused(response: httpx2.Response, status: int, message: str) -> None:
    assert response.status_code == status
    (found,) = [json.loads(line) for line in response.text.splitlines()]
    assert message in found["message"]
    assert found["error"].endswith("Error")
    guarded(response)


def guarded(response: httpx2.Response) -> None:
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", PAGE)
def test_the_page_is_served_whole(studio: TestClient, path: str) -> None:
    response = studio.get(f"/{path}")
    assert response.status_code == 200
    file, kind = PAGE[path]
    assert response.content == file.read_bytes()
    assert response.headers["content-type"] == kind
    guarded(response)


def test_the_page_names_no_other_origin() -> None:
    for file, _ in PAGE.values():
        text = file.read_text(encoding="utf-8")
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), file


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py",
        "/%2e%2e/server.py",
        "/..%2f..%2fserver.py",
        "/page/studio.css",
        "/studio.css/",
        "//etc/passwd",
        "/studio.css%00",
    ],
)
def test_no_path_leads_anywhere_else(studio: TestClient, path: str) -> None:
    request = studio.build_request("GET", "/")
    request.url = request.url.copy_with(raw_path=path.encode())
    response = studio.send(request, follow_redirects=False)
    assert response.status_code in (307, 404)
    assert "import" not in response.text


@pytest.mark.parametrize("host", ["127.0.0.1:8737", "localhost:8737", "localhost", "[::1]:8737", "10.0.0.7:80"])
def test_an_address_is_served(studio: TestClient, host: str) -> None:
    assert studio.get("/about", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8737", "127.0.0.1.evil.example:8737", "", "localhost.evil"]
)
def test_a_name_that_may_be_rebound_is_refused(studio: TestClient, host: str) -> None:
    refused(studio.get("/about", headers={"Host": host}), 403, "expected an IP address or localhost")


def test_a_name_that_was_given_is_served() -> None:
    with TestClient(make_app("node7"), base_url="http://node7:8737") as studio:
        assert studio.get("/about").status_code == 200


def test_other_sites_cannot_post(studio: TestClient) -> None:
    evil = {"Origin": "http://evil.example"}
    refused(studio.post("/answer", json=SMALL, headers=evil), 403, "expected the studio's own page")
    plain = {"Content-Type": "text/plain"}
    refused(studio.post("/answer", content=json.dumps(SMALL), headers=plain), 403, "expected application/json")
    own = {"Origin": "http://127.0.0.1:8737"}
    assert lines(studio.post("/answer", json=SMALL, headers=own))[0]["verified"]


def test_answers_travel(studio: TestClient) -> None:
    (found,) = lines(studio.post("/answer", json=SMALL))
    schedule = mm.plan(mm.Mesh("4x4", failed=["2x2@0,0"]), payload_bytes=1e6, hardware="tpu-v6e", budget_s=0.5)
    assert found["seconds"] == mm.predict(schedule, 1e6, "tpu-v6e").seconds
    rows = lines(studio.post("/alternatives", json=SMALL))
    assert [row["name"] for row in rows][-2:] == ["sub-mesh", "no failures"]
    assert lines(studio.post("/steps", json=SMALL))[0]["steps"] == schedule.n_steps
    assert studio.get("/layout?shape=4x4&wrap=none").json()["shape"] == [4, 4]
    about = studio.get("/about").json()
    assert State.read(about["defaults"]) == State()
    assert "auto" in about["planners"]


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("/answer", b"nonsense", "is not JSON"),
        ("/answer", b"[" * 100_000, "is not JSON"),
        ("/answer", b"[]", "expected an object"),
        ("/answer", b'{"colour": 1}', "has no field 'colour'"),
        ("/answer", b'{"shape": "4y4"}', "'4y4' is not a shape"),
        ("/answer", b'{"shape": "99x99"}', "has 9,801 chips; the studio shows up to 2,048"),
        ("/answer", b'{"shape": "4x4", "fail": ["4x1@0,1"]}', "disconnected groups"),
        ("/answer", b'{"planner": "guess"}', "There is no planner 'guess'"),
        ("/answer", b'{"hardware": "abacus"}', "The studio has no hardware 'abacus'"),
        ("/answer", b'{"payload": "much"}', "is not a payload"),
        ("/plan", b'{"shape": "4y4"}', "'4y4' is not a shape"),
    ],
)
def test_what_cannot_be_answered_says_why(studio: TestClient, path: str, content: bytes, message: str) -> None:
    response = studio.post(path, content=content, headers={"Content-Type": "application/json"})
    refused(response, 200, message)


@pytest.mark.parametrize("kind", ["file", "pipe"])
@pytest.mark.parametrize("path", ["/answer", "/alternatives", "/steps", "/plan"])
def test_no_file_of_this_machine_is_opened(
    studio: TestClient, path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question names it as its hardware. A named pipe would keep the process that opens it until its time is over."""
    monkeypatch.setattr(workers, "TIME_LIMIT_S", 20.0)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short name, as a state has
        named = Path(folder) / "rates.json"
        if kind == "file":
            write_hardware(Hardware("somebody's", 1e9), named, {})
        else:
            os.mkfifo(named)
        response = studio.post(path, json={"shape": "4x4", "hardware": str(named)})
    refused(response, 200, f"The studio has no hardware '{named}', and opens no files.")


def test_layouts_have_limits(studio: TestClient) -> None:
    refused(studio.get("/layout?shape=99x99"), 200, "the studio shows up to 2,048")
    refused(studio.get("/layout"), 200, "is not a shape")
    refused(studio.get("/layout?shape=" + "1x" * 100), 200, "at most 64 characters")


def test_requests_have_limits(studio: TestClient) -> None:
    large = b" " * (MAX_QUESTION_BYTES + 1)
    refused(studio.post("/answer", content=large, headers={"Content-Type": "application/json"}), 413, "1,048,576 bytes")


def test_unknown_places_say_where_the_page_is(studio: TestClient) -> None:
    refused(studio.get("/nothing"), 404, "The page is at /.")
    refused(studio.get("/answer"), 404, "nothing at GET /answer")


def test_a_plan_is_a_file(studio: TestClient, tmp_path: Path) -> None:
    data = studio.post("/plan", json=SMALL).content
    (tmp_path / "plan.npz").write_bytes(data)
    assert mm.load(tmp_path / "plan.npz").mesh == mm.Mesh("4x4", failed=["2x2@0,0"])


def test_an_answer_that_nobody_waits_for_is_stopped() -> None:
    async def click_on() -> None:
        workers = AnswerProcesses()
        first = workers.run("alternatives", State(shape="16x32"))
        assert (await anext(first))["name"] == CHOICES[0].name
        assert len(multiprocessing.active_children()) == 1
        await first.aclose()

    asyncio.run(click_on())
    assert no_process_is_left()


def no_process_is_left() -> bool:
    ends = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < ends:
        time.sleep(0.01)
    return not multiprocessing.active_children()


def test_an_answer_that_was_left_alone_closes_no_file_of_others(tmp_path: Path) -> None:
    async def leave() -> None:
        workers = AnswerProcesses()
        found: Any = workers.run("alternatives", State(shape="16x32"))
        await anext(found)
        cycle = [found]
        cycle.append(cycle)
        del found, cycle
        gc.collect()  # calls what closes files, and only then what ends the generator
        with contextlib.ExitStack() as files:
            opened = [files.enter_context((tmp_path / str(i)).open("w")) for i in range(32)]
            await asyncio.sleep(1)
            for i, file in enumerate(opened):
                assert os.fstat(file.fileno()).st_ino == (tmp_path / str(i)).stat().st_ino

    asyncio.run(leave())
    assert no_process_is_left()


def test_a_closed_connection_stops_the_work() -> None:
    async def leave() -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        body = json.dumps({"shape": "32x64", "budget": 10, "hardware": "tpu-v6e", "payload": "1GB"}).encode()
        inbox = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            return inbox.pop() if inbox else {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        app = make_app()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/answer",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        }
        async with app.router.lifespan_context(app):
            await app(scope, receive, send)  # type: ignore[arg-type]
        return sent

    sent = asyncio.run(asyncio.wait_for(leave(), 60))
    assert no_process_is_left()
    assert b"".join(message.get("body", b"") for message in sent) == b""


def test_a_job_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshmend_lab.studio.workers.TIME_LIMIT_S", 0.01)

    async def wait() -> None:
        async for _ in AnswerProcesses().run("answer", State(shape="32x32")):
            pass

    with pytest.raises(NoAnswerError, match="Choose a smaller mesh or a shorter search"):
        asyncio.run(wait())
    assert no_process_is_left()
