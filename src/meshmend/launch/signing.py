"""Signatures of the files that a job trusts: nobody can make them without its secret.

A worker never sees the secret. Its agent derives a key for files from it, and puts that into the worker's environment.
Without a secret there is no key: nothing is signed, and every signature is taken.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from meshmend.launch.messages import derive_key

FILE_KEY = "MESHMEND_FILE_KEY"
"""Where a worker finds the key that it signs files with."""
KEY_ENDS = "MESHMEND_KEY_ENDS"
"""Set where the secret was drawn for this run and ends with it: then files that outlive the run are not signed."""


def hand_over_key(secret: str) -> None:
    """Put the key into the environment of the workers to come, if there is a secret."""
    if secret:
        os.environ[FILE_KEY] = derive_key(secret, FILE_KEY).hex()


def file_key(*, lasting: bool = False) -> bytes:
    """Return the key, b"" if there is none; with `lasting`, only one that the next run of the job has, too."""
    return b"" if lasting and KEY_ENDS in os.environ else bytes.fromhex(os.environ.get(FILE_KEY, ""))


def signature(key: bytes, what: str, content: bytes | memoryview) -> str:
    """Return the signature of what a file has; `what` says what kind of file it is. "" without a key."""
    return hmac.new(hmac.digest(key, what.encode(), "sha256"), content, "sha256").hexdigest() if key else ""


def is_signed(key: bytes, what: str, content: bytes | memoryview, found: str) -> bool:
    """Whether a signature is right, or there is no key to tell."""
    return not key or hmac.compare_digest(signature(key, what, content).encode(), found.encode())


def checksum(key: bytes, content: bytes | memoryview) -> str:
    """Return a checksum of many bytes that without the key cannot be made for others; without a key, anybody can.

    >>> len(checksum(b"", b"abc")), checksum(b"", b"abc") == checksum(b"key", b"abc")
    (32, False)
    """
    return hashlib.blake2b(content, digest_size=16, key=key).hexdigest()
