"""Certificates of a job: one short-lived CA and one leaf per rank, named `rank-N.job`.

The CA's private key is never written, so nobody can add a rank to a job later on.
"""

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NUM_RANKS = 2
CLOCK_SKEW = datetime.timedelta(minutes=5)
LIFETIME = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def certificate_pem(self) -> bytes:
        """The certificate as PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        """The private key as unencrypted PKCS #8 PEM."""
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


def rank_name(rank: int) -> str:
    """The DNS name that the certificate of `rank` carries."""
    return f"rank-{rank}.job"


def _builder(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name, expired: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    end = now - CLOCK_SKEW if expired else now + LIFETIME
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def make_ca(name: str = "job CA") -> Issued:
    """A new self-signed CA that may issue leaves only (RFC 5280 section 4.2.1.9)."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(name, key, subject, expired=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_ca=True), critical=True)
    )
    return Issued(builder.sign(key, hashes.SHA256()), key)


def issue_leaf(ca: Issued, name: str, *, expired: bool = False) -> Issued:
    """A leaf of `ca` for the DNS name `name`, good for either end of a connection."""
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(name, key, ca.certificate.subject, expired)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key()),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    )
    return Issued(builder.sign(ca.key, hashes.SHA256()), key)


def write_private(path: Path, content: bytes) -> None:
    """Writes a new file that only its owner can read; an existing one is an error."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def make_certificates(directory: Path) -> None:
    """Writes `ca.pem`, and `rank-N.pem` and `rank-N.key` of every rank, into `directory`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    ca = make_ca()
    write_private(directory / "ca.pem", ca.certificate_pem())
    for rank in range(NUM_RANKS):
        leaf = issue_leaf(ca, rank_name(rank))
        write_private(directory / f"rank-{rank}.pem", leaf.certificate_pem())
        write_private(directory / f"rank-{rank}.key", leaf.key_pem())
