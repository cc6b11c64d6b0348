"""A bucket on this machine, in a process of its own: gcp-storage-emulator, with Google's generations.

They refuse an upload (412) if the object has not the generation that was asked for (ifGenerationMatch; 0: is not there)
and say with each download which generation it is; the emulator does neither. It serves one request after the other, so
looking and writing are one.
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
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._server = subprocess.Popen(command, **pipes, text=True)
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
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks for the kind of bucket, with credentials
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

    def generation(request: Any, storage: Any, name: str) -> str:
        found = storage.objects.get(request.params["bucket_name"], {}).get(name)
        return "0" if found is None else str(found["generation"])

    def insert(request: Any, response: Any, storage: Any) -> None:
        if wanted := request.query.get("ifGenerationMatch"):
            named = request.query.get("name") or [request.data["meta"]["name"]]
            if wanted[0] != generation(request, storage, named[0]):
                response.status = HTTPStatus.PRECONDITION_FAILED
                return
        plain_insert(request, response, storage)

    def download(request: Any, response: Any, storage: Any) -> None:
        there = generation(request, storage, request.params["object_id"])
        response["x-goog-generation"] = there
        if request.query.get("ifGenerationNotMatch") == [there]:
            response.status = HTTPStatus.NOT_MODIFIED
        else:
            plain_download(request, response, storage)

    def move(request: Any, response: Any, storage: Any) -> None:
        request.params["dest_bucket_name"] = request.params["bucket_name"]
        objects.copy(request, response, storage)
        if response.status == HTTPStatus.OK:
            objects.delete(request, response, storage)

    plain_insert, plain_download = objects.insert, objects.download
    objects.download = download
    ours = {plain_insert: insert, plain_download: download}
    for _, methods in server.HANDLERS:
        methods |= {method: ours.get(handler, handler) for method, handler in methods.items()}
    # The emulator has no such call, and to what it answers gcsfs tries for a minute whether that was a passing fault.
    moving = r".*/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.*[^/]+)/moveTo/o/(?P<dest_object_id>.*[^/]+)$"
    server.HANDLERS = ((moving, {server.POST: move}), *server.HANDLERS)
    http.server.HTTPServer.request_queue_size = 128
    emulator = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket=NAME)
    emulator.start()
    sys.stdout.write(f"{emulator._api._httpd.server_address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    emulator.stop()


if __name__ == "__main__":
    serve()
