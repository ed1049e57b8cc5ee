"""The errors of the checkpoint package: each says what was expected, what was found, what to do.

ShiftbookError
└── CheckpointError
    ├── FingerprintError
    │   ├── UnsupportedTensor
    │   ├── IncompleteFingerprint
    │   ├── LayoutError
    │   └── TiedWeightsDiffer
    ├── PatchError (names the tensor)
    │   ├── PatchDamaged
    │   ├── PatchRefused
    │   └── PatchUnencodable
    ├── BundleError (names the bundle and the part)
    │   ├── ManifestInvalid
    │   ├── PartMissing
    │   ├── PartDamaged
    │   ├── PartMismatch
    │   ├── BundleWriteFailed
    │   └── EarlierSaveFailed
    ├── SamplerStateError
    ├── LoaderWorkerLost
    ├── RandomStreamError
    │   └── RandomStreamChanged (names the owners)
    ├── LiveSnapshotDamaged
    ├── TransferError (names the target or the source)
    │   ├── TransferRefused
    │   │   ├── BaseRefused
    │   │   └── TokenRefused
    │   ├── TransferDamaged
    │   ├── SourceLost
    │   ├── StagingFailed
    │   └── ServingFailed
    └── RecorderMisuse
"""

from __future__ import annotations

from shiftbook.ledger.errors import ShiftbookError


class CheckpointError(ShiftbookError):
    """Base of everything that the checkpoint package raises on purpose."""


class FingerprintError(CheckpointError):
    """A fingerprint was asked for, added or read in a way that has no meaning."""


class UnsupportedTensor(FingerprintError):
    """The object is no dense tensor of a dtype whose bits are defined."""


class IncompleteFingerprint(FingerprintError):
    """Partial fingerprints do not cover each element of the logical tensor exactly once."""


class LayoutError(FingerprintError):
    """A declared layout does not account for each element of a stored tensor exactly once."""


class TiedWeightsDiffer(FingerprintError):
    """Names that were declared to be one tensor have different contents."""


class PatchError(CheckpointError):
    """A patch cannot be made, read or applied; `tensor` names the tensor where there is one."""

    def __init__(self, message: str, *, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


class PatchDamaged(PatchError):
    """The bytes are no patch that this program wrote: cut off, altered, or of another format."""


class PatchRefused(PatchError):
    """A sound patch that does not belong on these tensors: another base, other names or shapes."""


class PatchUnencodable(PatchError):
    """No patch leads from these tensors to those: other names, shapes, dtypes, or NaNs."""


class BundleError(CheckpointError):
    """A bundle cannot be written or read; `part` names which of its parts is concerned."""

    def __init__(self, message: str, *, path: str = "", part: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.part = part


class ManifestInvalid(BundleError):
    """The manifest is missing, cut off, not JSON, of another format, or not its own digest's."""


class PartMissing(BundleError):
    """A part, a file of it or a tensor in it is not there, or one is there that nobody declared."""


class PartDamaged(BundleError):
    """The bytes of a part are not the bytes that were saved."""


class PartMismatch(BundleError):
    """A part is readable but holds other tensors than its manifest says (another step's, say)."""


class BundleWriteFailed(BundleError):
    """The disk refused the bundle; nothing of it was left behind."""


class EarlierSaveFailed(BundleError):
    """A save in the background failed and nobody asked for its result; `__cause__` is its error."""


class SamplerStateError(CheckpointError):
    """A sampler state belongs to another rule, seed or data set, or points outside of it."""


class LoaderWorkerLost(CheckpointError):
    """A process that fetched samples ended; what it had is fetched again in a new iteration."""


class RandomStreamError(CheckpointError):
    """Random states do not fit the generators that they are to be restored to."""


class RandomStreamChanged(RandomStreamError):
    """A generator was reseeded or drawn from between its restore and its first use."""

    def __init__(self, message: str, *, owners: tuple[str, ...]) -> None:
        super().__init__(message)
        self.owners = owners


class LiveSnapshotDamaged(CheckpointError):
    """A tensor that arrived with a move is not the tensor that was sent."""

    def __init__(self, message: str, *, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


class TransferError(CheckpointError):
    """A version of weights cannot be published, pulled or taken; `where` names who is concerned."""

    def __init__(self, message: str, *, where: str | None = None) -> None:
        super().__init__(message)
        self.where = where


class TransferRefused(TransferError):
    """Someone asked who may not, or for what is not there; asking again changes nothing."""


class BaseRefused(TransferRefused):
    """A difference does not belong on what the receiver holds; the whole weights do."""


class TokenRefused(TransferRefused):
    """A token has ended, or is of another secret; with a good one the pull goes on where it was."""


class TransferDamaged(TransferError):
    """Bytes arrived that are not those that were published, or that are none of this program's."""


class SourceLost(TransferError):
    """A source cannot be reached, died, or keeps silent for longer than was allowed."""


class StagingFailed(TransferError):
    """There is no room for the second copy that a version is gathered in."""


class ServingFailed(TransferError):
    """A source cannot begin to serve: its port, its certificate or its secret is of no use."""


class RecorderMisuse(CheckpointError):
    """The recorder was called out of order or with something that it cannot record."""
