"""Writes a file that a person named: whole and synced or not at all, over nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shiftbook.ledger.durable import replace_file, sync_path
from shiftbook.ledger.errors import InvalidInput

HEAD_BYTES = 1024
"""How much of a file that stands there is looked at to tell what it is."""


def write_asked_file(
    path: Path, data: bytes, *, kind: str, is_kind: Callable[[bytes], bool]
) -> None:
    """Write ``data`` to ``path``, durable on return; what stands there is replaced only where it
    is of that kind.

    ``kind`` names it for people ("a report"); ``is_kind`` tells it by the first HEAD_BYTES. An
    empty file is replaced as well, and a pipe or a device is written to. A slip of the hand must
    not cost a ledger or a key. Raises InvalidInput.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        head = b""
        if path.exists():
            with path.open("rb") as there:
                head = there.read(HEAD_BYTES)
        if head and not is_kind(head):
            raise InvalidInput(
                f"expected a new file or {kind} at {path}, found something else, which is not "
                "replaced; give another name"
            )
        replace_file(path, data, alone=False)
        sync_path(path.parent)
    except OSError as error:
        raise InvalidInput(
            f"expected to write {path}, found: {error.strerror}; "
            "name a file in a folder that can be written"
        ) from error
