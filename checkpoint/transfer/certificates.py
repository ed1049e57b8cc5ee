"""Certificates for transfers within one's own machines: an authority and one server under it.

For tests and for clusters without an authority of their own; any other PEM files do as well.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shiftbook.checkpoint.errors import ServingFailed

DAYS = 30.0
MOST_DAYS = 3650.0
_SKEW = datetime.timedelta(hours=1)
"""A certificate is good from an hour ago, since clocks differ."""


@dataclass(frozen=True)
class ServerFiles:
    """Where a source's certificate and key lie, and the authority that receivers trust."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def within(cls, folder: Path) -> ServerFiles:
        """The names that `make_certificates` gives them."""
        return cls(folder / "authority.pem", folder / "server.pem", folder / "server.key")


def make_certificates(
    folder: Path,
    hosts: Sequence[str],
    *,
    days: float = DAYS,
    now: datetime.datetime | None = None,
) -> ServerFiles:
    """Write an authority's certificate and a server's with its key, for these names and addresses.

    The authority's key is forgotten, so nobody can make another server under it. Raises
    ServingFailed without hosts, where files of these names stand already, and for days that are
    none.
    """
    files = ServerFiles.within(folder)
    standing = [path.name for path in _all(files) if path.exists()]
    if standing or not hosts:
        raise ServingFailed(
            f"expected hosts and a folder without certificates, found hosts {list(hosts)} and "
            f"{standing or 'none'} in {folder}; name the hosts and a new folder",
            where=str(folder),
        )
    named = all(host.isascii() and len(host.split()) == 1 for host in hosts)
    if not named or not 0 < days <= MOST_DAYS:
        raise ServingFailed(
            f"expected names of hosts and above 0 to {MOST_DAYS:g} days, found "
            f"{list(hosts)} and {days:g}; name each host, and say for how long",
            where=str(folder),
        )
    begin = (now or datetime.datetime.now(datetime.UTC)) - _SKEW
    end = begin + _SKEW + datetime.timedelta(days=days)
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = _name("Shiftbook transfer authority")
    authority = (
        _builder(issuer, issuer, authority_key.public_key(), begin, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    server = (
        _builder(_name(hosts[0]), issuer, server_key.public_key(), begin, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key = server_key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.key.touch(mode=0o600)
        files.key.write_bytes(key)
        files.certificate.write_bytes(server.public_bytes(pem))
        files.authority.write_bytes(authority.public_bytes(pem))
    except OSError as error:
        raise ServingFailed(
            f"expected to write certificates to {folder}, found {error.strerror}", where=str(folder)
        ) from error
    return files


def _all(files: ServerFiles) -> tuple[Path, ...]:
    return files.authority, files.certificate, files.key


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )
