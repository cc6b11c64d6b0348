"""Certificates for JAX's coordinator, made from the job's secret: no file is copied between hosts.

Every host derives the same authority from the secret and the job's name, and its agent signs a certificate for the
worker of each round. A worker gets that certificate, with a key of its own, and never the secret. Whoever does not know
the secret has no certificate that the job's processes accept, nor one that the job accepts of a coordinator.
"""

from __future__ import annotations

import datetime
import hashlib
import inspect
import json
import os
import socket
import ssl
from importlib.util import find_spec
from typing import Any

from meshmend.errors import RestartError
from meshmend.launch.addresses import split_address

CREDENTIALS = "MESHMEND_TLS"
"""Where an agent puts a worker's certificate, in its environment."""
VALID_DAYS = 400.0
"""How long a certificate is valid: longer than any round, each of which has new ones. The secret is the job's alone."""
CLOCKS_DAYS = 1.0
"""By how much the clocks of hosts may differ."""
AUTHORITY = "meshmend job"
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def make_credentials(secret: str, job: str, host: int, *, days: float = VALID_DAYS) -> str:
    """Return a host's certificate, its key, the authority, and whom to accept, as JSON; "" without `cryptography`."""
    if not secret or find_spec("cryptography") is None:
        return ""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    drawn = HKDF(hashes.SHA256(), length=48, salt=b"meshmend tls 1", info=job.encode()).derive(os.fsencode(secret))
    authority = ec.derive_private_key(int.from_bytes(drawn, "big") % (P256_ORDER - 1) + 1, ec.SECP256R1())
    own = ec.generate_private_key(ec.SECP256R1())
    prefix = f"spiffe://meshmend/{hashlib.sha256(job.encode()).hexdigest()[:16]}/"  # in place of names of hosts
    day, now = datetime.timedelta(days=1), datetime.datetime.now(datetime.UTC)

    def certify(name: str, key: ec.EllipticCurvePublicKey, *extensions: x509.ExtensionType) -> str:
        issuer, subject = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one)]) for one in (AUTHORITY, name))
        first, last = now - (CLOCKS_DAYS + max(0.0, -days)) * day, now + days * day
        made = x509.CertificateBuilder().issuer_name(issuer).subject_name(subject).public_key(key)
        made = made.serial_number(x509.random_serial_number()).not_valid_before(first).not_valid_after(last)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
        for one in (*extensions, signer, x509.SubjectKeyIdentifier.from_public_key(key)):
            made = made.add_extension(one, critical=isinstance(one, x509.BasicConstraints | x509.KeyUsage))
        return made.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()

    uses = dict.fromkeys(inspect.signature(x509.KeyUsage).parameters, False) | {"key_cert_sign": True}
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    identity = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{prefix}host-{host}")])
    found = {
        "cert": certify(f"host {host}", own.public_key(), identity),
        "key": own.private_bytes(*form).decode(),
        "ca": certify(
            AUTHORITY, authority.public_key(), x509.BasicConstraints(ca=True, path_length=0), x509.KeyUsage(**uses)
        ),
        "prefix": prefix,
    }
    return json.dumps(found)


def write_credentials(credentials: str) -> dict[str, str]:
    """Return them as arguments of `jax.distributed.initialize`: files that only this process has, and end with it."""
    found = json.loads(credentials)
    return {f"mtls_{name}_file": _in_memory(found[name]) for name in ("cert", "key", "ca")} | {
        "mtls_peer_uri_prefix": found["prefix"]
    }


def _in_memory(text: str) -> str:
    handle = os.memfd_create("meshmend-tls")
    os.write(handle, text.encode())
    return f"/proc/self/fd/{handle}"


def check_coordinator(address: str, files: dict[str, str], timeout_s: float) -> None:
    """Raise `RestartError` if whoever answers there is not of this job, or does not take this worker for one of it.

    JAX would try again until its time limit, and then end the process with SIGABRT.
    """
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=files["mtls_ca_file"])
    context.check_hostname, context.minimum_version = False, ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(files["mtls_cert_file"], files["mtls_key_file"])
    try:
        plain = socket.create_connection(split_address(address), timeout_s)
        with context.wrap_socket(plain) as peer:
            peer.recv(1)  # who is refused hears of it with the first read
            shown: Any = peer.getpeercert() or {}
    except (OSError, ValueError) as error:
        why = getattr(error, "verify_message", "") or str(error)
        raise RestartError(
            f"Whoever answers at {address}, where process 0's coordinator should be, does not show that it belongs to "
            f"this job: {why}. Either it is a stranger, or process 0 does not use certificates. Give all hosts the "
            "same secret, the same JAX, and `cryptography`, or none of them `cryptography`. See whether their "
            f"clocks are within {CLOCKS_DAYS:g} day of each other."
        ) from error
    prefix = files["mtls_peer_uri_prefix"]
    if not any(kind == "URI" and name.startswith(prefix) for kind, name in shown.get("subjectAltName", ())):
        raise RestartError(f"Whoever answers at {address} has a certificate for something else than the job.")
