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


def replace_file(path: Path, data: bytes) -> None:
    """Put content in the place of a file's, whole or not at all; `sync_path` its folder after."""
    draft = path.with_name(path.name + ".new")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
