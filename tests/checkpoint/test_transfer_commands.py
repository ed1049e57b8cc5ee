"""Goal: `shiftbook checkpoint transfer` makes files that sources and receivers take, once.

Method: the commands are run in an empty folder; the token is checked under the secret, the
certificate against its authority, and what stands already is left alone with exit code 2.
"""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from shiftbook.checkpoint.errors import ServingFailed, TransferRefused
from shiftbook.checkpoint.transfer.tokens import check_token, read_secret
from shiftbook.ledger.cli import main


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", "transfer", *map(str, words)])


def test_secret_and_token(tmp_path: Path) -> None:
    secret = tmp_path / "transfer.secret"
    assert run("secret", "--out", secret).exit_code == 0
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    issued = run("token", "--secret", secret, "--target", "engine-3", "--ttl-s", 60)
    assert issued.exit_code == 0
    token = issued.output.strip()
    key = read_secret(secret)
    assert key.hex() not in issued.output
    assert check_token(key, token) == "engine-3"
    with pytest.raises(TransferRefused, match="ended"):
        check_token(key, token, now_s=4e9)
    before = secret.read_bytes()
    assert run("secret", "--out", secret).exit_code == 2
    assert secret.read_bytes() == before
    assert run("token", "--secret", tmp_path / "none", "--target", "e").exit_code == 2
    secret.write_text("00ff")
    with pytest.raises(ServingFailed, match="32 bytes"):
        read_secret(secret)


def test_certificates(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    made = run("certificates", "--out", folder, "--host", "trainer.example", "--host", "10.0.0.7")
    assert made.exit_code == 0
    assert made.output.split() == [
        str(folder / name) for name in ("authority.pem", "server.pem", "server.key")
    ]
    assert stat.S_IMODE((folder / "server.key").stat().st_mode) == 0o600
    authority, server = (
        x509.load_pem_x509_certificate((folder / name).read_bytes())
        for name in ("authority.pem", "server.pem")
    )
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["trainer.example"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    again = run("certificates", "--out", folder, "--host", "other.example")
    assert again.exit_code == 2
    assert run("certificates", "--out", tmp_path / "none").exit_code == 2
