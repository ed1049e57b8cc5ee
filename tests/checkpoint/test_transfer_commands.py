"""Goal: `shiftbook checkpoint transfer` makes files that sources and receivers take, once.

Method: the commands are run in an empty folder; the token is checked under the secret, the
certificate against its authority, and what stands already is left alone with exit code 2.
"""

from __future__ import annotations

import base64
import hmac
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from shiftbook.checkpoint.errors import ServingFailed, TransferRefused
from shiftbook.checkpoint.transfer.tokens import check_token, issue_token, read_secret
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


@pytest.mark.parametrize(
    "words",
    [
        ("token", "--target", "e", "--ttl-s", "-5"),
        ("token", "--target", "e", "--ttl-s", "nan"),
        ("token", "--target", "e", "--ttl-s", "inf"),
        ("token", "--target", ""),
        ("certificates", "--host", "a", "--days", "-1"),
        ("certificates", "--host", "a", "--days", "nan"),
        ("certificates", "--host", ""),
        ("certificates", "--host", "a b"),
    ],
    ids=" ".join,
)
def test_what_names_nothing_or_ends_never_is_refused(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    secret, folder = tmp_path / "transfer.secret", tmp_path / "tls"
    assert run("secret", "--out", secret).exit_code == 0
    where = ("--secret", secret) if words[0] == "token" else ("--out", folder)
    done = run(*words, *where)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "expected" in done.stderr
    assert "fault of shiftbook" not in done.stderr
    assert not folder.exists()


def test_a_token_whose_end_is_no_number_is_refused() -> None:
    secret = b"s" * 32
    token = issue_token(secret, "e", 60, now_s=0.0)
    text = base64.urlsafe_b64decode(token.partition(".")[0]).replace(b"60.0", b"NaN")
    forged = base64.urlsafe_b64encode(text).decode()
    signed = f"{forged}.{hmac.new(secret, forged.encode(), 'sha256').hexdigest()}"
    with pytest.raises(TransferRefused, match="something else"):
        check_token(secret, signed)
