"""Files that are whole after a crash, or not there."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Make a file's content, or a folder's list of names, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, *, alone: bool = True) -> None:
    """Put content in the place of a file's, whole or not at all; `sync_path` its folder after.

    Where another process may write the same file at once, the caller is not ``alone``, and each
    has a draft of its own. What a crash leaves of a draft is written over by the next one.
    """
    draft = path.with_name(f"{path.name}.new{'' if alone else f'-{os.getpid()}'}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
