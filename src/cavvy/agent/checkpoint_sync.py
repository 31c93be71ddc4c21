"""Uploads checkpoints to the control plane when the checkpoint folder is not on shared storage.

The folder is checked every few seconds while the work runs. A separate process uploads the changes
once the folder has stayed unchanged between two checks, or has changed for half the checkpoint
interval; then the process uploads what the work has finished. Only one upload runs at a time. A
checkpoint is complete, and is reported, once the control plane has all of its files.
"""

from __future__ import annotations

import time

from .control_client import complain
from .outbox import file_time_text
from .sidecar import SidecarPlace, SidecarProcess
from .work.checkpoint_choice import FILLED_S
from .work.checkpoint_files import (
    SHORTEST_S,
    fingerprint,
    list_checkpoint,
    newest,
    watch_start_ns,
)
from .work.checkpoint_hand_over import hand_over
from .work.torn_files import TornFiles
from .work.unsafe_files import UnsafeFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .work.checkpoint_files import FileEntry

LOOK_S = 3.0
PATIENCE_S = 30.0  # maximum seconds of constant changes before an upload of what is finished
SLOW_S = 10.0  # seconds of an upload below which no one is warned that it takes long
# minimum seconds after which a folder that is always being filled is no single save
FILLED_MIN_S = 2.0
SETTLE_S = 1.0  # maximum seconds between the two looks of an upload
HURRY_S = 0.5  # seconds between checks when the node is about to be reclaimed
RESTLESS_S = 300.0  # seconds of constant changes after which the user is warned
UNSAFE_S = 60.0  # minimum seconds after which a file that is in no checkpoint is named
# consecutive failed uploads after which the user is warned about a file that changes constantly
VOIDS = 5
# maximum number of uploads tried after the work's end, when the folder no longer changes
LAST_TRIES = 3


class CheckpointSync(SidecarProcess):
    """Uploads checkpoints. A timer starts each check of the folder. `finish` uploads the final
    state and then calls back; `kill` aborts that upload.
    """

    def __init__(
        self,
        place: SidecarPlace,
        folder: str,
        *,
        every_s: float | None,
        given: list[str] | None = None,
    ) -> None:
        super().__init__(place, min(LOOK_S, every_s / 4) if every_s else LOOK_S)
        self._folder, self._given = folder, given
        self._patience_s = min(PATIENCE_S, every_s / 2 if every_s else PATIENCE_S)
        self._filled_s = max(FILLED_MIN_S, every_s) if every_s else FILLED_S
        self._settle_s = min(SETTLE_S, self._every_s / 4)
        self._cut_ns = 0  # when the work was killed by a signal
        self._torn_files, self._torn = TornFiles(), frozenset[int]()
        # a single save takes less time than the interval that the task states
        self._unsafe_files = UnsafeFiles(max(UNSAFE_S, 2 * every_s) if every_s else RESTLESS_S)
        self._unsafe = ""  # which files have been in no checkpoint for long, and why
        self._told_unnamed = self._told_slow = False
        self._stated_s = every_s or 0.0
        # whether the user was warned that the folder is a link to another place
        self._told_unlisted = False
        found = self._list()
        # The files that exist before the work starts need no upload: the next attempt gets them
        # anyway.
        self._safe = self._last = fingerprint(found)
        self._newest_ns = newest(found)
        self._began_ns = watch_start_ns(bool(found))
        self._restless_since = 0.0
        self._told_restless = False
        self._result: dict[str, Any] = {}
        self._voids = 0
        self._trouble = ""  # why the last upload failed: "silent" or "failed"; "" if it succeeded
        self._number: object = None
        self._tries = 0
        self._is_last = False  # whether the running upload began after the work's end
        self._is_over = False  # whether all that the ended work has finished is uploaded

    def hurry(self) -> None:
        """Check the folder more often, because the node will be reclaimed soon."""
        self._every_s = min(self._every_s, HURRY_S)

    def find_unsafe(self) -> str:
        """Return the checkpoint folder if it has changes that are not uploaded yet, else "". The
        result is always "" on a rank that does not upload.
        """
        found = fingerprint(self._list())
        return self._folder if found and found != self._safe and self._config.rank == 0 else ""

    def _look(self) -> None:
        found = fingerprint(self._list())
        still, self._last = found == self._last, found
        if not found or found == self._safe or self._off:
            self._restless_since = 0.0
        elif self._config.rank > 0:
            self._refuse()
        elif still and self._process is None:
            self._start()
        elif not still:
            self._look_for_rest()

    def note_writers(self) -> None:
        """Take note of the files that the work has open, before it gets a signal."""
        self._torn_files.note({entry.inode for entry in self._list()})

    def cut(self, *, killed: bool, failed: bool) -> None:
        """Take note of how the work ended just now. If another process `killed` it, what it was
        writing is not whole. If it `failed` after a signal of the agent, the files that were open
        then are not whole, except files that the work wrote to long after the signal.
        """
        self._cut_ns = time.time_ns() if killed else 0
        changed_ns = {entry.inode: entry.mtime_ns for entry in self._list()}
        self._torn = self._torn_files.find(changed_ns, failed=failed)

    def _list(self) -> list[FileEntry]:
        """Return the files of the checkpoint folder, or [] if the folder cannot be listed."""
        try:
            return list_checkpoint(self._config, self._folder, self._given)
        except OSError as error:
            if not self._told_unlisted:
                self._told_unlisted = True
                self._warn(f"the checkpoint folder cannot be uploaded: {error}")
            return []

    def _look_for_rest(self) -> None:
        now = time.monotonic()
        self._restless_since = self._restless_since or now
        if now - self._restless_since >= self._patience_s and self._process is None:
            self._start()
        if now - self._restless_since > RESTLESS_S and not self._told_restless:
            self._told_restless = True
            self._warn(
                "files in the checkpoint folder change constantly, and none of them was finished; "
                "write a new file and rename it when it is complete"
            )

    def _refuse(self) -> None:
        """Warn that this rank's files are lost with the node: only rank 0's folder is uploaded."""
        self._off = True
        self._warn(
            f"rank {self._config.rank} writes to its own checkpoint folder, but without shared "
            "storage, only rank 0's folder is saved: this rank's files are lost with the node"
        )

    def _start(self) -> None:
        self._result = {}
        copy_first = self._voids > 0 and self._done is None
        since, began, quiet = self._newest_ns, self._began_ns, self._trouble == "silent"
        settle_s = self._settle_s if self._done is None else 0.0
        filled_s, cut_ns, torn = self._filled_s, self._cut_ns, self._torn
        self._is_last = self._done is not None
        why = self._run(
            lambda: hand_over(
                self._config,
                self._folder,
                copy_first=copy_first,
                since_ns=since,
                began_ns=began,
                quiet=quiet,
                given=self._given,
                settle_s=settle_s,
                filled_s=filled_s,
                cut_ns=cut_ns,
                torn=torn,
            ),
        )
        if why:
            complain(f"cannot upload a checkpoint now: {why}")

    def _heard(self, told: dict[str, Any]) -> None:
        if told["state"] == "full":
            self._warn(
                "the control plane's disk is full: the checkpoint is uploaded when space is free"
            )
        elif told["state"] == "waits":
            self._say(
                "event", name="waits", text=f"the checkpoint is not safe yet: {told['reason']}"
            )
        else:
            self._result = told

    def _over(self) -> None:
        state = self._result.get("state")
        if "unsafe" in self._result:
            self._note_unsafe(self._result["unsafe"])
        if state == "saved":
            self._saved(self._result)
        elif state == "refused":
            self._off = True
            self._warn(f"no more checkpoints will be uploaded: {self._result['reason']}")
        elif state in ("silent", "failed"):
            self._not_now(state, str(self._result["reason"]))
        elif state == "same":
            self._is_over = self._is_last
        elif state == "void":
            self._voids += 1
            if self._voids == VOIDS:
                self._warn(
                    f"{self._result['reason']} changed during every upload: no checkpoint is safe; "
                    "write a new file and rename it instead"
                )

    def _note_unsafe(self, files: dict[str, str]) -> None:
        """Name the files that have been in no checkpoint for long, when these have changed."""
        found = self._unsafe_files.note(files)
        if found and found != self._unsafe:
            self._told_restless = True
            self._warn(found)
        self._unsafe = found

    def _not_now(self, trouble: str, reason: str) -> None:
        """Warn about a failed upload. The upload is tried again later, unless the work has ended
        and the bucket did not respond in time.
        """
        if trouble == "silent" and self._done is not None:
            self._tries = LAST_TRIES
        if trouble != self._trouble:
            self._trouble = trouble
            again = "" if self._done is not None else "; retrying"
            self._warn(f"the checkpoint is not safe: {reason}{again}")

    def _saved(self, result: dict[str, Any]) -> None:
        self._safe, self._voids, self._number = str(result["print"]), 0, result["number"]
        self._trouble, self._restless_since = "", 0.0
        self._is_over = self._is_last
        if result.get("unnamed") and not self._told_unnamed:
            self._told_unnamed = True
            self._warn(
                f"the checkpoint is safe without {result['unnamed']}: the file's name or the "
                "link's target is not UTF-8; rename the file"
            )
        self.seconds = float(str(result["seconds"]))
        if self.seconds > max(self._stated_s, SLOW_S) and self._stated_s and not self._told_slow:
            self._told_slow = True
            self._warn(
                f"a checkpoint is complete only {self.seconds:.0f} s after the program has written "
                f"it, which is longer than `checkpoint.every` ({self._stated_s:g} s): a lost node "
                "can cost more work than that; save less often, or less"
            )
        fields = {name: result[name] for name in ("number", "files", "bytes", "sent", "seconds")}
        self._newest_ns = int(str(result["newest_ns"]))
        if float(str(result["wrote_s"])) >= SHORTEST_S:
            fields["cost_s"] = result["wrote_s"]
        if self._unsafe:
            fields["text"] = self._unsafe
        self._say("checkpoint", newest_at=file_time_text(self._newest_ns / 1e9), **fields)

    def _finish(self, done: Callable[[], None]) -> None:
        found = fingerprint(self._list())
        if not found or found == self._safe or self._is_over or self._config.rank > 0:
            done()
        elif self._off or self._tries == LAST_TRIES:
            last = (
                f"the newest saved checkpoint is {self._number}"
                if self._number
                else "no checkpoint of this attempt was saved"
            )
            self._warn(
                f"the last changes to the checkpoint folder could not be uploaded in time; {last}"
            )
            done()
        else:
            self._tries += 1
            self._start()
            if self._process is None:
                done()
