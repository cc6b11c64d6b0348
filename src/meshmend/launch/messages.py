"""The wire protocol between a job's hosts and its store. Everything that arrives is untrusted until authenticated.

The store sends first:

    challenge   store → host     MAGIC, 32 random bytes
    hello       host → store     frame: who it is, 32 random bytes of its own
    refused     store → host     frame without a tag: one of `REFUSALS`

Then both speak as `AuthenticatedChannel` says.

A frame is MAGIC, the length of its body (4 bytes, big-endian), a tag of 32 bytes, and the body, which is JSON. The tag
is an HMAC-SHA256 of the body, of what kind of message it is, and of the other side's random bytes, with a key derived
from the job's secret and its name. So a frame from another job, from another kind of message or from an earlier
connection is rejected, and a body is not parsed before its tag is verified. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

import numpy as np

from meshmend.errors import RestartError

DEFAULT_PORT = 29400
"""Where a store listens, unless it is told otherwise."""
MAGIC = b"mm-rdv\x00\x02"
HELLO = "hello to a store"
NONCE_BYTES = 32
TAG_BYTES = 32
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
HEADER_BYTES = len(MAGIC) + 4 + TAG_BYTES
MAX_HELLO_BYTES = 16 << 10
"""Of a body: facts are a few hundred bytes, and any set of 20,000 hosts at most 3.4 KB."""
MAX_BODY_BYTES = 64 << 10
"""Of a body in a channel: events, of which a host sends one batch at a time."""
MAX_HOSTS = 1 << 20
"""Numbers of hosts are below this."""
HOST_SETS = ("hosts", "cut_off")
"""What an `AuthenticatedChannel` packs of a message."""

REFUSALS = {
    "malformed": "its message was malformed",
    "key": "its secret or its job is another one; MESHMEND_SECRET and MESHMEND_JOB must be the same on all hosts",
    "slow": "it took too long",
    "full": "too many came at once",
    "files": "no file descriptor was left for it",
}
"""Why a connection is rejected. Only the code is sent, so that no terminal shows text from an unauthenticated peer.

A rejection has no tag: anybody can send one. So it is a reason to try again later, and never one to give up."""


class MessageError(ValueError):
    """Bytes that are not the expected message. Field `code`: a word of `REFUSALS`."""

    def __init__(self, code: str) -> None:
        self.code = code
        super().__init__(REFUSALS[code])


def make_key(secret: str, job: str) -> bytes:
    """Return the key of a job's messages. Without a secret it only distinguishes jobs."""
    return hmac.digest(os.fsencode(secret), b"meshmend rendezvous " + os.fsencode(job), "sha256")


def derive_key(secret: str, purpose: str) -> bytes:
    """Return a key for a purpose, from which nobody learns the secret: a worker has one to sign its files with."""
    return hmac.digest(os.fsencode(secret), b"meshmend key for " + purpose.encode(), "sha256")


def make_nonce() -> bytes:
    """Return random bytes that no message has ever been tagged with."""
    return secrets.token_bytes(NONCE_BYTES)


def make_challenge(nonce: bytes) -> bytes:
    """Return the store's challenge."""
    return MAGIC + nonce


def read_challenge(data: bytes) -> bytes:
    """Return the store's random bytes."""
    if not data.startswith(MAGIC) or len(data) != CHALLENGE_BYTES:
        raise MessageError("malformed")
    return data[len(MAGIC) :]


def pack(kind: str, message: Any, key: bytes, nonce: bytes, *, limit: int | None = None) -> bytes:
    """Return a frame: a message (anything that JSON can write) of some kind, for the one who sent a nonce."""
    return _seal(kind, encode(message, limit=limit), key, nonce)


def encode(message: Any, *, limit: int | None = None) -> bytes:
    """Return the body of a message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if limit is not None and len(body) > limit:
        raise RestartError(
            f"This host's message to the store has {len(body)} bytes, expected at most {limit}. Shorten it."
        )
    return body


def pack_hosts(numbers: Collection[int]) -> str:
    """Return a set of hosts as text: one bit per host, compressed. A round's message has to reach all of its hosts.

    >>> text = pack_hosts([*range(5000), *range(5001, 10000)])
    >>> len(text) < 100, len(unpack_hosts(text))
    (True, 9999)
    """
    bits = np.zeros(max(numbers, default=-1) + 1, dtype=bool)
    bits[list(numbers)] = True
    return base64.b64encode(zlib.compress(np.packbits(bits).tobytes())).decode()


@lru_cache(maxsize=16)  # all hosts of a round say the same
def unpack_hosts(text: str) -> tuple[int, ...]:
    """Return the hosts of a set, in order."""
    try:
        packed = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MAX_HOSTS // 8)
    except (ValueError, zlib.error):
        raise MessageError("malformed") from None
    return tuple(np.flatnonzero(np.unpackbits(np.frombuffer(packed, dtype=np.uint8))).tolist())


def pack_refusal(code: str) -> bytes:
    """Return the frame that rejects a connection."""
    body = json.dumps({"refused": code}).encode()
    return MAGIC + struct.pack(">I", len(body)) + bytes(TAG_BYTES) + body


class AuthenticatedChannel:
    """One side of an authenticated connection that stays: every frame is tagged with its number in one direction.

    So no frame can be repeated, left out, exchanged for another or sent back to where it came from.
    """

    def __init__(self, key: bytes, mine: bytes, theirs: bytes, *, to: str, of: str) -> None:
        self._key = key
        self._mine, self._theirs = mine, theirs
        self._to, self._of = f"to {to}", f"to {of}"
        self._sent = self._received = 0

    @staticmethod
    def encode(message: dict[str, Any]) -> bytes:
        """Return the body of a message, which may go to many."""
        packed = {name: pack_hosts(message[name]) for name in HOST_SETS if name in message}
        return encode({**message, **packed}, limit=MAX_BODY_BYTES)

    def pack(self, message: dict[str, Any]) -> bytes:
        """Return the frame of the next message to the other side."""
        return self.seal(self.encode(message))

    def seal(self, body: bytes) -> bytes:
        """Return the frame of the next message to the other side, of its body."""
        self._sent += 1
        return _seal(self._to, body, self._key, self._theirs + struct.pack(">Q", self._sent))

    def unpack(self, frame: bytes | bytearray) -> dict[str, Any]:
        """Return the next message of the other side."""
        self._received += 1
        message = unpack(self._of, frame, self._key, self._mine + struct.pack(">Q", self._received))
        return message | {name: unpack_hosts(message[name]) for name in HOST_SETS if name in message}


def frame_bytes(data: bytes | bytearray, limit: int) -> int | None:
    """Return how long the frame is that begins here, None if that is not known yet.

    Raises a `MessageError` as soon as it cannot become a frame of at most `limit` bytes of body.
    """
    if not MAGIC.startswith(bytes(data[: len(MAGIC)])):
        raise MessageError("malformed")
    if len(data) < len(MAGIC) + 4:
        return None
    (size,) = struct.unpack_from(">I", data, len(MAGIC))
    if size > limit:
        raise MessageError("malformed")
    return HEADER_BYTES + int(size)


def unpack(kind: str, frame: bytes | bytearray, key: bytes, nonce: bytes) -> dict[str, Any]:
    """Return the message in a whole frame; raise a `MessageError` unless its tag is right and it is a JSON object."""
    body = bytes(frame[HEADER_BYTES:])
    given = bytes(frame[len(MAGIC) + 4 : HEADER_BYTES])
    if not hmac.compare_digest(given, _tag(kind, body, key, nonce)):
        if kind != HELLO and (code := _refusal(body)) is not None:
            raise MessageError(code)
        raise MessageError("key")
    return _parse(body)


def read_frame(receive: Callable[[int], bytes], limit: int) -> bytes:
    """Read one frame, and not a byte more, from a function that returns at most so many bytes, and b"" at the end."""
    data = bytearray()
    while True:
        size = frame_bytes(data, limit)
        missing = (HEADER_BYTES if size is None else size) - len(data)
        if missing == 0:
            return bytes(data)
        more = receive(min(missing, 1 << 16))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more


def _seal(kind: str, body: bytes, key: bytes, nonce: bytes) -> bytes:
    return MAGIC + struct.pack(">I", len(body)) + _tag(kind, body, key, nonce) + body


def _tag(kind: str, body: bytes, key: bytes, nonce: bytes) -> bytes:
    # Kinds have no NUL in them, and all nonces of a kind one length, so no two messages give the same bytes.
    return hmac.digest(key, kind.encode() + b"\0" + nonce + body, "sha256")


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = _DECODER.decode(body.decode())
    except (ValueError, RecursionError):
        raise MessageError("malformed") from None
    if not isinstance(message, dict):
        raise MessageError("malformed")
    return message


def _refusal(body: bytes) -> str | None:
    """Return why the store rejects this host, if its message is a rejection."""
    try:
        code = _parse(body).get("refused")
    except MessageError:
        return None
    return code if isinstance(code, str) and code in REFUSALS else None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
