"""Stores the results of ended work in a bucket if the server does not respond, so that the node
need not wait for the server.

The server signs the uploads beforehand, while the work runs. The results are one sequence of bytes:
undelivered output, files of the checkpoint, and files of the outputs. The sequence of bytes is
split into objects of equal size. The manifest, which describes the bytes and contains the messages,
is sent last.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial

from ..allowed_folders import LeadsOutside
from ..control_client import RetryingConnection, complain
from ..disk import read_text
from ..documents import say_size
from ..ends import may_leave
from ..http_client import TransferFailed
from ..step_runner import log_failure
from ..work.checkpoint_files import list_checkpoint
from ..work.checkpoint_upload import CheckpointUpload, FileChanged
from ..work.folder import CannotBuild, check_seen
from ..work.prepare import copy_outputs
from ..work.process import WorkProcess
from ..work.reaper import ChildCommand
from .mounts import list_checkpoint_volumes
from .paths import find_folders, find_output
from .transfer import ObjectUpload
from .upload import is_due, list_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..allowed_folders import AllowedFolders
    from ..config import AgentConfig, ConfigFields
    from ..control_client import ControlPlaneClient
    from ..documents import WorkConfig
    from ..log import LogSpool
    from ..loop import EventLoop, LoopTimer
    from ..outbox import MessageOutbox

    Entry = dict[str, object]
    Read = Callable[[int, int], bytes]  # offset, length
    Piece = tuple[Entry, int, Read]  # description, size, reader
    Ended = tuple[Entry, str, list[int]]  # exit, unsent checkpoint folder or "", unsent outputs

ASK_S = 1.0  # seconds until the first request for signed uploads; shorter work sends none
RETRY_S = 60.0
PART_BYTES = 16 * 1024 * 1024  # minimum bytes of one object (a part of the results)
MANIFEST_BYTES = 16 * 1024 * 1024  # maximum bytes of a manifest that the server reads


class ResultsDeposit:
    """Gets signed uploads from the server while the work runs. Stores the results in a separate
    process once the server has been silent for long enough.
    """

    def __init__(
        self,
        loop: EventLoop,
        config: AgentConfig,
        work: WorkConfig,
        link: ControlPlaneClient,
        outbox: MessageOutbox,
        log: LogSpool,
        foresee: Callable[[], Ended | None],
    ) -> None:
        self._loop, self._config, self._work = loop, config, work
        self._link, self._outbox, self._log, self._foresee = link, outbox, log, foresee
        self._channel = RetryingConnection(link, self._ask)
        self._uploads: list[Entry] = []
        self._most_bytes = 0  # maximum bytes of one object
        self._valid_until = 0.0
        self._process: WorkProcess | None = None
        self._retry_at = 0.0
        self.stored = False
        self._timer: LoopTimer | None = loop.after(ASK_S, self._ask)

    def is_complete(self) -> bool:
        """Return whether the results are in the bucket and the server is still silent. The method
        is called once per second. If the server has been silent for long enough, a call also starts
        storing the results.
        """
        now = time.monotonic()
        valid = len(self._uploads) > 1 and now < self._valid_until
        silent_s = now - self._link.heard_at
        if not may_leave(self._work.deposit_after_s, silent_s, stored=valid):
            self.stored = False  # this agent must deliver the results itself
            self._kill()
        elif not self.stored and self._process is None and now >= self._retry_at:
            ended = self._foresee()
            if ended is not None:
                exit, folder, outputs = ended
                messages = self._outbox.finish(exit)
                self._start(Results(self._config, self._work, messages, self._log, folder, outputs))
        return self.stored

    def close(self) -> None:
        self._loop.cancel(self._timer)
        self._channel.close()
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _start(self, results: Results) -> None:
        complain("the server is silent: storing the results in the bucket")
        self._retry_at = time.monotonic() + RETRY_S
        command = ChildCommand(
            [],
            {},
            self._config.home,
            lambda channel: store(results, self._uploads, self._most_bytes),
        )
        try:
            self._process = WorkProcess(
                self._loop, command, wrote=log_failure, ended=self._ended, gone=self._gone
            )
        except OSError as error:
            complain(f"the results cannot be stored now: {error}")

    def _ended(self, code: int | None) -> None:
        self.stored = code == 0
        self._retry_at = time.monotonic() + RETRY_S

    def _gone(self) -> None:
        self._process = None

    def _ask(self) -> None:
        if self._channel.idle and not self._link.closed:
            path = f"/agent/v1/data/deposit{self._link.query}"
            self._channel.ask("GET", path, b"", self._signed)

    def _signed(self, fields: ConfigFields) -> None:
        self._uploads = fields.read("uploads", "list")
        self._most_bytes = fields.read("most_bytes", "int")
        self._valid_until = time.monotonic() + fields.read("valid_s", "float")
        self._timer = self._loop.after(fields.read("again_s", "float"), self._ask)


class Results:
    """The results of ended work, before the server has received them. `folder` is the
    checkpoint folder if it is not uploaded yet, else "". `outputs` are the indices of the outputs
    that are not sent yet.
    """

    def __init__(
        self,
        config: AgentConfig,
        work: WorkConfig,
        messages: list[str],
        log: LogSpool,
        folder: str,
        outputs: list[int],
    ) -> None:
        self._config, self._work, self._messages, self._log = config, work, messages, log
        self._folder, self._outputs = folder, outputs
        self._checkpoint: Entry | None = None
        self.pieces: list[Piece] = []

    def collect(self) -> None:
        """List the parts to store: pieces of the log, and the files of the checkpoint and the
        outputs. Outputs that cannot be read or copied are omitted; if an output is omitted,
        successful work is reported as failed. Raises FileChanged, OSError.
        """
        for offset, lost, size, read in self._log.pieces():
            self.pieces.append(({"kind": "log", "offset": offset, "lost": lost}, size, read))
        if self._folder:
            self._add_checkpoint()
        if self._outputs:
            try:
                copy_outputs(self._config, self._work, _refuse)
            except (CannotBuild, OSError) as error:
                self._fail("an output with a path as its target", error)
        for index in self._outputs:
            try:
                path, known = find_output(self._config, self._work, index)
                if os.path.lexists(path):
                    self._add_output(index, path, known)
            except (CannotBuild, OSError) as error:
                self._fail(f"the output {self._work.outputs[index].source}", error)

    def make_manifest(self, part_bytes: int) -> bytes:
        """Return the manifest, which describes the bytes of the sequence. Raises TransferFailed."""
        manifest = {
            "gang": self._config.gang,
            "rank": self._config.rank,
            "nonce": read_text(self._config.private + "/claim"),
            "messages": [json.loads(line) for line in self._messages],
            "checkpoint": self._checkpoint,
            "part_bytes": part_bytes,
            "pieces": [dict(fields, bytes=size) for fields, size, _ in self.pieces],
        }
        content = json.dumps(manifest).encode()
        if len(content) > MANIFEST_BYTES:
            raise TransferFailed(f"the list of the results is larger than {MANIFEST_BYTES} bytes")
        return content

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes of the sequence; the range may span several pieces."""
        found = bytearray()
        for _, size, read in self.pieces:
            if len(found) < length and offset < size:
                found += read(offset, min(length - len(found), size - offset))
            offset = max(0, offset - size)
        if len(found) != length:
            raise FileChanged("a file of the results")
        return bytes(found)

    def _add_checkpoint(self) -> None:
        given = list_checkpoint_volumes(self._config, self._work)
        entries = list_checkpoint(self._config, self._folder, given)
        if not entries:
            return
        upload = CheckpointUpload(self._config, self._folder, entries, given=given)
        upload.hash()
        self._checkpoint = upload.describe()
        for name, (entry, read) in upload.list_contents().items():
            self.pieces.append(({"kind": "blob", "name": name}, entry.size, read))

    def _add_output(self, index: int, path: str, known: dict[str, list[int]]) -> None:
        folders = find_folders(self._config, self._work)
        for source, name in list_files(folders, path, self._work.outputs[index].target, _refuse):
            if is_due(folders, source, name, known, 0.0):
                fields: Entry = {"kind": "output", "index": index, "name": name}
                read = partial(read_file, self._config, folders, source)
                read(0, 0)  # raises an error if the file cannot be read
                self.pieces.append((fields, folders.stat(source).st_size, read))

    def _fail(self, what: str, error: Exception) -> None:
        """Record that an output is omitted. The reason that is sent to the server does not contain
        the error's text, because secrets in that text would not be redacted.
        """
        _refuse(f"{what} is not stored: {error}")
        exit = json.loads(self._messages[-1])
        if exit["outcome"] == "succeeded":
            why = "a symbolic link leads out of the job's folders"
            if not isinstance(error, LeadsOutside):
                why = getattr(error, "strerror", None) or "the output could not be copied"
            exit.update(outcome="exit", exit_code=os.EX_IOERR)
            exit["reason"] = f"the work succeeded, but {what} is missing: {why}"
            self._messages[-1] = json.dumps(exit)


class SignedUploads:
    """Uploads that the server has signed in advance. The class has the methods of `TransferClient`
    that an upload needs."""

    def __init__(self, uploads: list[Entry], part_bytes: int) -> None:
        self._uploads, self._part_bytes = uploads, part_bytes

    def read(self, method: str, route: str = "", ask: object = None) -> Entry:
        if route == "/parts" and isinstance(ask, dict):
            return self._uploads[int(ask["part"]) - 1]
        return {"upload": "", "part_bytes": self._part_bytes}

    def ask(
        self, method: str, route: str = "", body: bytes | None = None, **query: object
    ) -> bytes:
        raise TransferFailed("the server does not respond and cannot relay")

    def abort(self, ask: Entry) -> None:
        """Do nothing: the server deletes aborted uploads."""


def store(results: Results, uploads: list[Entry], most_bytes: int) -> int:
    """Upload the results, the manifest last. Return the exit code of the process, which runs only
    this function.

    The upload first replaces the manifest of an earlier try with an empty manifest, because the
    earlier manifest does not describe the new objects.
    """
    try:
        results.collect()
        size = sum(size for _, size, _ in results.pieces)
        part_bytes = max(PART_BYTES, -(-size // (len(uploads) - 1)))
        if part_bytes > most_bytes:
            raise TransferFailed(f"the results are too large: {say_size(size)}")
        manifest = results.make_manifest(part_bytes)
        send_manifest(uploads, b"")
        if size:
            target = SignedUploads(uploads[1:], part_bytes)
            ObjectUpload(target, {}, "the results", None).send(size, results.read)
        send_manifest(uploads, manifest)
    except (TransferFailed, CannotBuild, FileChanged, OSError) as error:
        os.write(2, f"the results cannot be stored now: {error}\n".encode())
        return 1
    return 0


def send_manifest(uploads: list[Entry], content: bytes) -> None:
    target = SignedUploads(uploads[:1], MANIFEST_BYTES)
    ObjectUpload(target, {}, "the manifest of the results", None).send(
        len(content), lambda offset, length: content[offset : offset + length]
    )


def read_file(
    config: AgentConfig, folders: AllowedFolders, path: str, offset: int, length: int
) -> bytes:
    """Read `length` bytes of an output file at `offset`. Raises CannotBuild, LeadsOutside,
    OSError."""
    with open(folders.open_file(path), "rb") as file:
        check_seen(config, f"/proc/self/fd/{file.fileno()}")
        return os.pread(file.fileno(), length, offset)


def _refuse(text: str) -> None:
    complain(text.encode("utf-8", "backslashreplace").decode())
