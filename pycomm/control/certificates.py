"""A private CA for a job, and the folders of certificates that its hosts carry.

The CA's folder holds `ca.pem`, `ca.key` (0600: whoever has it can join the job) and `job`. A host's
folder is what PYCOMM_CERTS names: `ca.pem`, `certificate.pem`, `key.pem` (0600), `peers` (the name
that rank r's certificate must carry, with {rank} in it) and, once something is denied, `denied`.

Keys are ECDSA on P-256, certificates X.509 v3 (RFC 5280) with DNS names, for client and server
alike, since either side of a pair may connect.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DOMAIN = "pycomm.internal"
_CLOCK_SKEW = timedelta(hours=1)
_PUBLIC, _PRIVATE = 0o644, 0o600
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class CertificateError(RuntimeError):
    """A folder or a certificate is not what it should be; the message says what to do."""


def _write_all(files: dict[Path, tuple[bytes, int]]) -> None:
    """Writes files with their modes: all are on the disk before the first one takes its place."""
    staged: list[tuple[str, Path, int]] = []
    try:
        for path, (content, mode) in files.items():
            # Mode 0600 until it is in its place.
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            staged.append((temporary, path, mode))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for temporary, path, mode in staged:
            Path(temporary).chmod(mode)
            Path(temporary).replace(path)
    finally:
        for temporary, _, _ in staged:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"'{path}' is no ECDSA key")
    return key


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 over the certificate, as PYCOMM_TLS_DENIED lists it."""
    return certificate.fingerprint(hashes.SHA256()).hex()


@dataclass(frozen=True)
class Authority:
    """The CA of a job."""

    folder: Path
    job: str

    @staticmethod
    def create(folder: Path, job: str, days: int = 3650) -> Authority:
        """Makes a CA in `folder`.

        Raises:
            CertificateError: there is one already, or `job` is no DNS label.
        """
        if not _LABEL.fullmatch(job):
            raise CertificateError(
                f"'{job}' cannot name a job: small letters, digits and hyphens, at most 63"
            )
        if (folder / "ca.key").exists():
            raise CertificateError(f"'{folder}' holds a CA already")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(f"pycomm CA of {job}")
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        _write_all(
            {
                folder / "job": (job.encode(), _PUBLIC),
                folder / "ca.pem": (pem, _PUBLIC),
                folder / "ca.key": (_key_pem(key), _PRIVATE),
            }
        )
        return Authority(folder, job)

    @staticmethod
    def open(folder: Path) -> Authority:
        """The CA in `folder`. Raises: CertificateError when there is none."""
        if not (folder / "ca.key").exists() or not (folder / "job").exists():
            raise CertificateError(f"there is no CA in '{folder}'; pycomm certs init {folder}")
        return Authority(folder, (folder / "job").read_text().strip())

    @property
    def peers(self) -> str:
        """The name in rank r's certificate, with {rank} for r."""
        return f"rank-{{rank}}.{self.job}.{DOMAIN}"

    def names(self, ranks: Sequence[int] | None) -> list[str]:
        """What a certificate for these ranks, or (None) for any, carries."""
        if ranks is None:
            return [f"*.{self.job}.{DOMAIN}"]
        return [self.peers.format(rank=rank) for rank in ranks]

    def issue(self, folder: Path, ranks: Sequence[int] | None = None, days: int = 90) -> None:
        """Fills a host's folder with a fresh key and certificate; one that is there is replaced.

        Args:
            folder: The host's, for PYCOMM_CERTS.
            ranks: That may run there. Default: any of the job.
            days: Until the certificate ends.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = x509.load_pem_x509_certificate((self.folder / "ca.pem").read_bytes())
        authority_key = _load_key(self.folder / "ca.key")
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        names = self.names(ranks)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(names[0]))
            .issuer_name(authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(min(now + timedelta(days=days), authority.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
            )
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
                critical=False,
            )
            .sign(authority_key, hashes.SHA256())
        )
        files = {
            folder / "ca.pem": ((self.folder / "ca.pem").read_bytes(), _PUBLIC),
            folder / "peers": (self.peers.encode(), _PUBLIC),
            # Key before certificate: a reader in between sees a pair that does not fit.
            folder / "key.pem": (_key_pem(key), _PRIVATE),
            folder / "certificate.pem": (
                certificate.public_bytes(serialization.Encoding.PEM),
                _PUBLIC,
            ),
        }
        denied = self.folder / "denied"
        if denied.exists():
            files[folder / "denied"] = (denied.read_bytes(), _PUBLIC)
        _write_all(files)

    def renew(self, folder: Path, days: int = 90) -> None:
        """A fresh key and certificate for what the folder's certificate is made out to.

        Raises:
            CertificateError: the folder's certificate is of another job.
        """
        names = names_of(load_certificate(folder))
        ranks: list[int] | None = None
        if names != self.names(None):
            pattern = re.escape(self.peers).replace(r"\{rank\}", r"(\d+)")
            found = [re.fullmatch(pattern, name) for name in names]
            if not all(found):
                raise CertificateError(f"'{folder}' is made out to {', '.join(names)}, another job")
            ranks = [int(match[1]) for match in found if match]
        self.issue(folder, ranks, days)

    def deny(self, folder: Path) -> str:
        """Puts the folder's certificate on the CA's list, and returns its fingerprint.

        The list counts where it lies: `issue` copies it, hosts that have theirs need it again.
        """
        print_ = fingerprint(load_certificate(folder))
        file = self.folder / "denied"
        before = file.read_text() if file.exists() else ""
        if print_ not in before:
            _write_all({file: (f"{before}{print_}  # {folder.name}\n".encode(), _PUBLIC)})
        return print_


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def load_certificate(folder: Path) -> x509.Certificate:
    """Of a host's folder. Raises: CertificateError when it has none."""
    path = folder / "certificate.pem"
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CertificateError(f"'{path}' cannot be read: {error}") from error


def names_of(certificate: x509.Certificate) -> list[str]:
    """The DNS names that it is made out to."""
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return list(extension.value.get_values_for_type(x509.DNSName))
