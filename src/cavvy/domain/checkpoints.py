"""Checkpoints that are stored for a job: their files, and the row that marks a checkpoint as
complete.
"""

from datetime import datetime

from cavvy.domain.values import Struct


class CheckpointFile(Struct, frozen=True, kw_only=True):
    """One file or link of a checkpoint. `path` is relative to the checkpoint's folder, with / as
    separator.
    """

    path: str
    sha256: str = ""
    size: int = 0  # bytes
    mode: int = 0o644
    mtime_ns: int = 0  # modification time; programs use it to find their newest file
    link: str | None = None  # target of a link; None for a file
    # offset and bytes of each extent of a sparse file, whose content is stored without the holes;
    # None if the content is stored as it is
    data: tuple[tuple[int, int], ...] | None = None

    @property
    def stored_size(self) -> int:
        """The size of the stored content in bytes."""
        return self.size if self.data is None else sum(length for _, length in self.data)


class SavedCheckpoint(Struct, frozen=True, kw_only=True):
    """A complete checkpoint: every file of its manifest is stored. `number` counts the checkpoints
    of the job from 1.
    """

    job_id: str
    project: str
    number: int = 0  # set by the store
    attempt: int  # number of the attempt that wrote the checkpoint
    manifest: str  # SHA-256 of the JSON list of the checkpoint's files
    files: int
    bytes: int
    made_at: datetime  # when the newest file of the checkpoint was written
    saved_at: datetime


class RemovedCheckpoints(Struct, frozen=True, kw_only=True):
    """The result of deleting a job's checkpoints. `kept` names the files that could not be deleted,
    with the reasons, or "" if all were deleted.
    """

    bytes: int = 0
    kept: str = ""
