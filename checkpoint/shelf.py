"""The folder that holds a job's bundles: its lock, its order, the latest bundle, retention."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shiftbook.checkpoint.errors import BundleError, BundleWriteFailed, ManifestInvalid
from shiftbook.checkpoint.manifest import MANIFEST_NAME, BundleManifest, check_files

BUNDLE_PREFIX = "bundle-"
_INCOMING_PREFIX = ".incoming-"
_LEAVING_PREFIX = ".leaving-"
_LOCK_NAME = ".shelf.lock"


@dataclass(frozen=True)
class SavedBundle:
    """A bundle that is complete and durable."""

    path: Path
    manifest: BundleManifest

    @property
    def bundle_id(self) -> str:
        """SHA-256 of the manifest."""
        return self.manifest.bundle_id


def list_bundles(root_dir: str | os.PathLike[str]) -> list[SavedBundle]:
    """The complete bundles, oldest save first.

    A folder whose manifest is missing or invalid, or whose files are absent or of another size,
    is not complete and not listed; contents are checked by `check_files` and on restore.
    """
    while True:
        found, left = [], False
        for path in _bundle_paths(Path(root_dir)):
            try:
                found.append(SavedBundle(path, check_files(path, content=False)))
            except BundleError:  # incomplete: not a bundle yet, or no longer
                left = left or not os.path.lexists(path)
        if not left:
            return found
        # Retention took one away since the names were read, and a newer one may have come.


def latest_bundle(root_dir: str | os.PathLike[str]) -> SavedBundle | None:
    """The complete bundle that was saved last, or None where there is none."""
    while True:
        left = False
        for path in reversed(_bundle_paths(Path(root_dir))):
            try:
                return SavedBundle(path, check_files(path, content=False))
            except BundleError:
                left = left or not os.path.lexists(path)
        if not left:
            return None
        # Retention took one away since the names were read, so a newer one has come.


def retain(
    root_dir: str | os.PathLike[str],
    keep: int,
    *,
    protected: Collection[str] = (),
    on_damaged: Callable[[BundleError], object] = lambda error: None,
) -> list[Path]:
    """Delete all complete bundles but the newest `keep`; returns what was deleted, oldest first.

    The bytes of those that are kept are read and compared with their SHA-256 first: one that is
    damaged stays, but does not count, so that it pushes out no good one; `on_damaged` is told of
    it. `protected` holds bundle ids that stay in any case (lineage, golden traces). Folders that
    are no complete bundle are not touched, and neither is one that somebody restores just now. Each
    is renamed before its files go, so a killed call leaves no half-deleted bundle behind.
    """
    if keep < 1:
        raise BundleError(f"expected to keep at least 1 bundle, found {keep}", path=str(root_dir))
    deleted = []
    with shelf_lock(root_dir) as root:
        for bundle in _before_the_newest(keep, list_bundles(root), on_damaged):
            if bundle.bundle_id in protected:
                continue
            with _unless_read(bundle.path) as free:
                if not free:
                    continue
                leaving = root / f"{_LEAVING_PREFIX}{bundle.path.name}"
                bundle.path.rename(leaving)
                shutil.rmtree(leaving)
                deleted.append(bundle.path)
    return deleted


@contextmanager
def _unless_read(bundle: Path) -> Iterator[bool]:
    """Keep readers away from a bundle that is about to go; False where one reads it now."""
    descriptor = os.open(bundle / MANIFEST_NAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks: nobody can say that it is read
            pass
        yield True
    finally:
        os.close(descriptor)


def _before_the_newest(
    keep: int, bundles: list[SavedBundle], on_damaged: Callable[[BundleError], object]
) -> list[SavedBundle]:
    """The bundles that are older than the newest `keep` good ones, oldest first."""
    good = 0
    for position in reversed(range(len(bundles))):
        path = bundles[position].path
        try:
            check_files(path)
            good += 1
        except BundleError as error:
            on_damaged(error)
        except OSError as error:  # one that may not be read cannot be relied on
            said = f"{path}: cannot be read ({error.strerror}); mend its permissions"
            on_damaged(BundleError(said, path=str(path)))
        if good == keep:
            return bundles[:position]
    return []


def withdraw(bundle: SavedBundle) -> None:
    """Take away a bundle that was made a moment ago and that nothing names yet."""
    with shelf_lock(bundle.path.parent) as root:
        leaving = root / f"{_LEAVING_PREFIX}{bundle.path.name}"
        bundle.path.rename(leaving)
        shutil.rmtree(leaving)


@contextmanager
def shelf_lock(root_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """Hold the folder for one saver or retention at a time; clear what a killed one left.

    The lock is the kernel's and goes with its process, so whatever lies unfinished in the folder
    once it is held belongs to nobody.
    """
    root = Path(root_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BundleWriteFailed(
            f"{root}: expected a folder that can be written, found {error.strerror}; "
            "choose another folder or mend its permissions",
            path=str(root),
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for path in root.iterdir():
            if path.name.startswith((_INCOMING_PREFIX, _LEAVING_PREFIX)):
                shutil.rmtree(path, ignore_errors=True)
        yield root
    finally:
        os.close(descriptor)


def incoming_folder(root: Path) -> Path:
    """Make a folder whose name no reader takes for a bundle."""
    folder = root / f"{_INCOMING_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return folder


def next_path(root: Path, bundle_id: str) -> Path:
    """Where the next bundle goes: names sort in the order of the saves."""
    paths = _bundle_paths(root)
    last = int(paths[-1].name.split("-")[1]) if paths else -1
    return root / f"{BUNDLE_PREFIX}{last + 1:08d}-{bundle_id[:12]}"


def find_bundle(path: str | os.PathLike[str]) -> Path:
    """A bundle's folder, given itself or a folder of bundles (then its latest)."""
    folder = Path(path)
    if not folder.is_dir():
        raise ManifestInvalid(
            f"{folder}: expected a bundle or a folder of bundles, found no folder; check the path",
            path=str(folder),
        )
    if folder.name.startswith(BUNDLE_PREFIX) or (folder / MANIFEST_NAME).exists():
        return folder
    latest = latest_bundle(folder)
    if latest is None:
        inside = shelves_in(folder)
        like = f"; name one of the folders in it that hold some: {', '.join(inside)}" * bool(inside)
        raise ManifestInvalid(
            f"{folder}: expected a bundle or a folder of bundles, found no complete bundle in it"
            f"{like}",
            path=str(folder),
        )
    return latest.path


def shelves_in(folder: Path) -> list[str]:
    """Names of the folders directly in ``folder`` that hold bundles, such as one for each job."""
    return sorted(
        path.name for path in folder.iterdir() if path.is_dir() and any(_bundle_paths(path))
    )


def _bundle_paths(root: Path) -> list[Path]:
    """Folders named like bundles, in the order of their saves."""
    if not root.is_dir():
        return []
    named = []
    for path in root.iterdir():
        pieces = path.name.split("-")
        if path.name.startswith(BUNDLE_PREFIX) and len(pieces) == 3 and pieces[1].isdigit():
            named.append((int(pieces[1]), path.name, path))
    return [path for _, _, path in sorted(named)]
