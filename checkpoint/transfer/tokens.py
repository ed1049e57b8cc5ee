"""Tokens that let one receiver pull for a while: its name and an end, under a shared secret.

A token is `BASE64URL(JSON) "." HEX(HMAC-SHA256(secret, BASE64URL(JSON)))`. Who reads it learns the
name and the end; who has it may pull and report under that name until the end, and nothing else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import math
import secrets
import time
from pathlib import Path
from typing import Any

from shiftbook.checkpoint.errors import ServingFailed, TransferRefused

SECRET_BYTES = 32
_DOMAIN = "shiftbook-transfer-token-v1"


def write_secret(path: Path) -> None:
    """A new secret in a file that only its owner reads. Raises ServingFailed where one stands."""
    try:
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(secrets.token_hex(SECRET_BYTES) + "\n", encoding="ascii")
    except OSError as error:
        raise ServingFailed(
            f"expected to write a new secret to {path}, found {error.strerror}; name another file",
            where=str(path),
        ) from error


def read_secret(path: Path) -> bytes:
    """The secret in a file. Raises ServingFailed."""
    try:
        found = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError) as error:
        raise ServingFailed(
            f"expected a secret in {path}, could not read one ({error}); make it with "
            "`shiftbook checkpoint transfer secret`",
            where=str(path),
        ) from error
    if len(found) < SECRET_BYTES:
        raise ServingFailed(
            f"expected a secret of {SECRET_BYTES} bytes in {path}, found {len(found)}; make one "
            "with `shiftbook checkpoint transfer secret`",
            where=str(path),
        )
    return found


def issue_token(secret: bytes, target: str, ttl_s: float, *, now_s: float | None = None) -> str:
    """A token for one receiver, good for `ttl_s` seconds from now. Raises ServingFailed."""
    if not target or not (0 < ttl_s < math.inf):
        raise ServingFailed(
            f"expected the name of a receiver and a number of seconds above 0, found {target!r} "
            f"and {ttl_s:g}; name the engine, and say how long the token is good",
            where=target,
        )
    ends_s = (time.time() if now_s is None else now_s) + ttl_s
    claim = {"domain": _DOMAIN, "target": target, "ends_s": round(ends_s, 3)}
    text = base64.urlsafe_b64encode(json.dumps(claim, sort_keys=True).encode()).decode()
    return f"{text}.{_mac(secret, text)}"


def check_token(secret: bytes, token: str, *, now_s: float | None = None) -> str:
    """The name that a token stands for. Raises TransferRefused, and repeats nothing of it."""
    text, _, mac = token.partition(".")
    if not hmac.compare_digest(_mac(secret, text).encode(), mac.encode()):
        raise TransferRefused(
            "expected a token under this source's secret, found another; issue one with "
            "`shiftbook checkpoint transfer token` and the secret that the source was started with"
        )
    try:
        claim: Any = json.loads(base64.urlsafe_b64decode(text))
        target, ends_s = str(claim["target"]), float(claim["ends_s"])
        known = claim["domain"] == _DOMAIN and math.isfinite(ends_s)
    except (binascii.Error, ValueError, KeyError, TypeError) as error:
        raise TransferRefused("expected a token of this version of Shiftbook") from error
    if not known:
        raise TransferRefused(
            "expected a token for transfers with an end, found one for something else"
        )
    late_s = (time.time() if now_s is None else now_s) - ends_s
    if late_s >= 0:
        raise TransferRefused(
            f"{target}: expected a token that is still good, found one that ended {late_s:.0f} s "
            "ago; issue a new one, and look at both machines' clocks",
            where=target,
        )
    return target


def _mac(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
