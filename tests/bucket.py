"""A bucket on this machine, in a process of its own: gcp-storage-emulator, with one promise of Google's that it lacks.

An upload that asks for it (ifGenerationMatch=0) creates an object or fails with 412; the emulator would replace it. It
serves one request after the other, so looking and creating are one.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import subprocess
import sys
import urllib.parse
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAME = "bucket"


class Bucket:
    """A bucket called `NAME`, at a server of its own."""

    def __enter__(self) -> Self:
        command = [sys.executable, str(Path(__file__).absolute())]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        self._port = int(self._server.stdout.readline())
        self.url = f"http://127.0.0.1:{self._port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.kill()
        self._server.communicate()

    @property
    def environment(self) -> dict[str, str]:
        """What those who are to find it must have in their environment."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "GCE_METADATA_ROOT": "127.0.0.1:1",  # nobody asks a metadata server, nor waits for one
        }

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all objects, by the server's own interface: no library is between."""
        found = self._ask("GET", f"/storage/v1/b/{NAME}/o?{urllib.parse.urlencode({'prefix': prefix})}")
        return [str(item["name"]) for item in json.loads(found).get("items", [])]

    def put(self, name: str, content: bytes) -> None:
        query = urllib.parse.urlencode({"uploadType": "media", "name": name})
        self._ask("POST", f"/upload/storage/v1/b/{NAME}/o?{query}", content)

    def _ask(self, method: str, where: str, content: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, where, content)
            answer = connection.getresponse()
            assert answer.status == HTTPStatus.OK, (where, answer.status)
            return answer.read()


def serve() -> None:
    """Serve until standard input ends: with the process that has started this one."""
    from gcp_storage_emulator import server
    from gcp_storage_emulator.handlers import objects

    def insert(request: Any, response: Any, storage: Any) -> None:
        if request.query.get("ifGenerationMatch") == ["0"]:
            named = request.query.get("name") or [request.data["meta"]["name"]]
            if storage.buckets and named[0] in storage.objects.get(request.params["bucket_name"], {}):
                response.status = HTTPStatus.PRECONDITION_FAILED
                return
        objects.insert(request, response, storage)

    for _, methods in server.HANDLERS:
        methods |= {method: insert for method, handler in methods.items() if handler is objects.insert}
    http.server.HTTPServer.request_queue_size = 128
    emulator = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket=NAME)
    emulator.start()
    sys.stdout.write(f"{emulator._api._httpd.server_address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    emulator.stop()


if __name__ == "__main__":
    serve()
