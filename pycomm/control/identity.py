"""What a rank shows of itself, and how it judges others: by chain, dates, name and list.

TLS over TCP does the same in the core (csrc/platform/tls.h).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aioquic.tls import Alert, AlertDescription, verify_certificate
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
# Either side of a pair may connect, so a certificate has to serve for both (RFC 5280 4.2.1.12).
_USES = frozenset({ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH})
# The core looks for these words, and comes again.
NOT_YET = "no group here awaits that process yet"


class RefusedError(RuntimeError):
    """The peer is not who it should be; `alert` is the TLS alert for it."""

    def __init__(
        self, reason: str, alert: AlertDescription = AlertDescription.access_denied
    ) -> None:
        super().__init__(reason)
        self.alert = alert


@dataclass(frozen=True)
class Identity:
    """What this process shows, and whom it trusts."""

    process_id: str
    certificate_file: Path
    key_file: Path
    ca_pem: bytes
    denied: frozenset[str]
    secret: bytes
    reset_key: bytes
    expected: dict[str, str]  # names by process id

    @staticmethod
    def load(options: dict[str, Any]) -> Identity:
        """From files, read anew. Raises: OSError, ValueError."""
        denied: set[str] = set()
        if options["denied_file"]:
            for line in Path(options["denied_file"]).read_text().splitlines():
                print_ = line.partition("#")[0].replace(":", "").strip().lower()
                if print_ and not _FINGERPRINT.fullmatch(print_):
                    raise ValueError(
                        f"'{options['denied_file']}' has a line that is no SHA-256 fingerprint: "
                        f"{line}"
                    )
                if print_:
                    denied.add(print_)
        ca_pem = Path(options["ca_file"]).read_bytes()
        if not ca_pem.strip():  # verify_certificate would trust the web's CAs instead
            raise ValueError(f"'{options['ca_file']}' is empty")
        return Identity(
            process_id=options["process_id"],
            certificate_file=Path(options["certificate_file"]),
            key_file=Path(options["key_file"]),
            ca_pem=ca_pem,
            denied=frozenset(denied),
            secret=options["secret"],
            reset_key=options["reset_key"],
            expected=dict(options["expected"]),
        )

    def judge(self, certificate: x509.Certificate | None, chain: list[x509.Certificate]) -> None:
        """Whether to talk on. Raises: RefusedError."""
        if certificate is None:
            raise RefusedError("it shows no certificate", AlertDescription.certificate_required)
        try:
            verify_certificate(certificate, chain, cadata=self.ca_pem)
        except Alert as error:
            raise RefusedError(str(error), error.description) from error
        with contextlib.suppress(x509.ExtensionNotFound):
            uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
            if not _USES.issubset(uses) and ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE not in uses:
                raise RefusedError(
                    "it may not serve as client and server",
                    AlertDescription.unsupported_certificate,
                )
        if certificate.fingerprint(hashes.SHA256()).hex() in self.denied:
            raise RefusedError(
                "it is denied by PYCOMM_TLS_DENIED", AlertDescription.certificate_revoked
            )

    def judge_name(self, certificate: x509.Certificate, process_id: str) -> None:
        """Whether the certificate is made out to that process's rank. Raises: RefusedError."""
        name = self.expected.get(process_id)
        if name is None:
            raise RefusedError(NOT_YET)
        try:
            verify_certificate(certificate, [], server_name=name, cadata=self.ca_pem)
        except Alert as error:
            raise RefusedError(f"its certificate is not made out to '{name}': {error}") from error

    def mac(self, label: str, *parts: bytes) -> str:
        """Shows that the job's secret is known, for this connection only."""
        text = b"\0".join([label.encode(), *parts])
        return hmac.digest(self.secret, text, hashlib.sha256).hex()
