"""The helper program that runs on the login node. The helper executes commands, reads and writes
files of the shared folder, and forwards the agents' requests. A letter is a file with an agent's
request to the control plane.

`login_session.py` sends this program to the login node. The program needs only the standard library
of Python 3.8 or newer, and exits when its input ends. The helper answers each request `{"id", "do",
...}` with a frame `{"id", "answer"}` or `{"id", "error", "kind"}`. The helper may answer requests
in any order. A frame `{"mail": path}` announces a request from an agent.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, BinaryIO

from cavvy.providers.hosts.supervisor.frames import FrameReader, encode_frame

FIRST_PAUSE_S, LAST_PAUSE_S = (
    0.02,
    1.0,
)  # seconds between polls for mail, because network file systems do not notify of new files
HOT_S = 30.0  # seconds of frequent polling after the last activity
LETTER_LIMIT = 64 * 1024 * 1024
CHANGES = ("make", "write", "drop", "reply")  # requests that change files
CHANGES_S = 10.0  # maximum seconds that the helper waits for running changes when its input ends
UNFINISHED = ".new-"  # the prefix of files and folders that are being written
ABANDONED_S = 3600.0  # seconds after which the writer of an unfinished folder must have exited


class HelperRefused(Exception):
    """Raised for an error that only a person can resolve; the message explains how."""


class FileMissing(OSError):
    """Raised if a file or folder is missing, for example while a file system is not mounted."""


class LoginHelper:
    """Answers requests until standard input ends."""

    def __init__(self, source: io.BufferedReader, sink: BinaryIO) -> None:
        self._source, self._sink = source, sink
        self._lock = threading.Lock()
        self._announced: set[str] = set()
        self._hot_until = 0.0
        self._awake = threading.Event()
        self._never = threading.Event()
        self._changes: list[threading.Thread] = []

    def serve(self) -> None:
        frames = FrameReader()
        while True:
            read = self._source.read1(1 << 18)
            if not read:
                self._finish_changes()
                os._exit(0)  # exit without waiting for commands that still run
            self._changes = [thread for thread in self._changes if thread.is_alive()]
            for asked, data in frames.feed(read):
                changes = asked["do"] in CHANGES
                thread = threading.Thread(target=self._answer, args=(asked, data), daemon=True)
                thread.start()
                if changes:
                    self._changes.append(thread)

    def _finish_changes(self) -> None:
        """Wait for running changes, so that no unfinished file or folder is left."""
        ends_at = time.monotonic() + CHANGES_S
        for thread in self._changes:
            thread.join(max(0.0, ends_at - time.monotonic()))

    def _answer(self, asked: dict[str, Any], data: bytes) -> None:
        number, do = asked.pop("id"), asked.pop("do")
        try:
            self._send({"id": number, "answer": getattr(self, "do_" + do)(data, **asked)})
        except Exception as error:  # noqa: BLE001 - every request needs an answer
            plain = isinstance(error, (HelperRefused, FileMissing))
            text = str(error) if plain else f"{type(error).__name__}: {error}"
            kind = "again" if isinstance(error, OSError) else "refused"
            self._send({"id": number, "error": text, "kind": kind})

    def _send(self, head: dict[str, Any], data: bytes = b"") -> None:
        with self._lock:
            self._sink.write(encode_frame(head, data))
            self._sink.flush()

    # Requests. Paths are absolute, except in `do_hello`.

    def do_hello(self, data: bytes, folder: str, tools: list[str]) -> dict[str, Any]:
        """Create the shared folder. Return facts about this login node, including which of `tools`
        are installed.
        """
        path = os.path.abspath(os.path.expanduser(folder))
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
        except OSError as error:
            raise FileMissing(
                f"the folder {path} cannot be created: {error.strerror}; set `folder` to another "
                "path"
            ) from error
        state = os.stat(path)
        if state.st_uid != os.getuid() or state.st_mode & 0o077:
            raise HelperRefused(
                f"{path} must be owned by user {os.getuid()} and closed to all others; run `chmod "
                "700` on it, or set `folder` to another path"
            )
        return {
            "folder": path,
            "uid": os.getuid(),
            "host": os.uname().nodename,
            "python": sys.version.split()[0],
            "tools": [tool for tool in tools if shutil.which(tool)],
        }

    def do_run(
        self, data: bytes, argv: list[str], limit_s: float, env: dict[str, str]
    ) -> dict[str, Any]:
        """Run a command with `data` as its input, and wait until the command ends."""
        self._heat()
        try:
            done = subprocess.run(
                argv,
                input=data,
                capture_output=True,
                timeout=limit_s,
                env={**os.environ, **env},
                cwd="/",
            )
        except FileNotFoundError:
            return {
                "code": 127,
                "out": "",
                "err": f"{argv[0]}: command not found",
            }  # worded like a shell's error
        except subprocess.TimeoutExpired:
            return {"code": None, "out": "", "err": f"no answer within {limit_s:g} s"}
        out, err = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        return {"code": done.returncode, "out": out, "err": err}

    def do_make(
        self, data: bytes, path: str, unless: list[str], files: list[tuple[str, int]]
    ) -> bool:
        """Create a folder with files atomically, by a rename. Return False if the folder, or one of
        the paths in `unless`, exists.
        """
        self._heat()
        if any(os.path.lexists(each) for each in [path, *unless]):
            return False
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fresh = tempfile.mkdtemp(prefix=UNFINISHED, dir=os.path.dirname(path))
        try:
            self._remove_abandoned(fresh)
            self._write(data, [(os.path.join(fresh, name), size) for name, size in files], False)
            try:
                os.rename(fresh, path)
            except OSError:
                if os.path.isdir(path):
                    return False
                raise
            return True
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def do_write(self, data: bytes, files: list[tuple[str, int]], keep: bool) -> None:
        """Write files, each atomically. If `keep` is True, existing files are not changed."""
        self._write(data, files, keep)

    def do_has(self, data: bytes, path: str) -> bool:
        return os.path.exists(path)

    def do_read(self, data: bytes, paths: list[str]) -> dict[str, str]:
        """Return the contents of the existing files in `paths`, as {path: content}."""
        found = {}
        for path in paths:
            try:
                with open(path, "rb") as file:
                    found[path] = file.read(1024 * 1024).decode("utf-8", "replace")
            except (FileNotFoundError, NotADirectoryError):
                continue
        return found

    def do_tree(self, data: bytes, root: str, names: list[str]) -> dict[str, dict[str, str]]:
        """Return the named files of each folder in `root`, as {folder: {name: content}}."""
        try:
            folders = [name for name in os.listdir(root) if not name.startswith(".")]
        except FileNotFoundError:
            return {}
        found = {}
        for folder in folders:
            paths = {os.path.join(root, folder, name): name for name in names}
            found[folder] = {
                paths[path]: text for path, text in self.do_read(b"", list(paths)).items()
            }
        return found

    def do_texts(self, data: bytes, root: str) -> dict[str, str]:
        """Return all files directly in `root`, as {name: content}."""
        try:
            names = [name for name in os.listdir(root) if not name.startswith(".")]
        except FileNotFoundError:
            return {}
        texts = self.do_read(b"", [os.path.join(root, name) for name in names])
        return {os.path.basename(path): text for path, text in texts.items()}

    def do_drop(self, data: bytes, paths: list[str], trash: str) -> None:
        """Move files and folders to the trash, and delete them in the background."""
        os.makedirs(trash, mode=0o700, exist_ok=True)
        for path in paths:
            try:
                os.rename(path, os.path.join(tempfile.mkdtemp(dir=trash), os.path.basename(path)))
            except FileNotFoundError:
                continue
        threading.Thread(target=self._empty, args=(trash,), daemon=True).start()

    def do_mail(self, data: bytes, folder: str) -> None:
        """Watch a folder, and announce each request file (letter) that agents write into it."""
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._heat()
        threading.Thread(target=self._pump, args=(folder,), daemon=True).start()

    def do_reply(self, data: bytes, letter: str) -> None:
        """Write the answer to a letter (a request file) into the sender's folder, then delete the
        letter.
        """
        self._heat()
        folder, name = os.path.split(letter)
        sender, _, number = name.rpartition("@")
        if os.path.isdir(os.path.join(folder, sender)):  # else the sender has exited
            self._write(data, [(os.path.join(folder, sender, number), len(data))], False)
        self._announced.discard(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(letter)

    # Implementation

    def _write(self, data: bytes, files: list[tuple[str, int]], keep: bool) -> None:
        at = 0
        for path, size in files:
            part, at = data[at : at + size], at + size
            if keep and os.path.exists(path):
                continue
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            descriptor, fresh = tempfile.mkstemp(prefix=UNFINISHED, dir=os.path.dirname(path))
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(part)
                os.rename(fresh, path)
            except OSError:
                os.unlink(fresh)
                raise

    def _remove_abandoned(self, fresh: str) -> None:
        """Delete unfinished folders next to the new folder `fresh` whose helpers were killed. Ages
        are measured by the clock of the file system, which may differ from this machine's clock.
        """
        folder, now = os.path.dirname(fresh), os.stat(fresh).st_mtime
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                if name.startswith(UNFINISHED) and now - os.lstat(path).st_mtime > ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)

    def _empty(self, trash: str) -> None:
        for name in os.listdir(trash):
            path = os.path.join(trash, name)
            shutil.rmtree(path, ignore_errors=True)
            if os.path.exists(path):  # the work has made folders read-only
                _make_removable(path)
                shutil.rmtree(path, ignore_errors=True)

    def _heat(self) -> None:
        """Poll more frequently for a while, because agents are likely to send requests soon."""
        self._hot_until = time.monotonic() + HOT_S
        self._awake.set()

    def _pump(self, folder: str) -> None:
        pause = FIRST_PAUSE_S
        while True:
            self._awake.clear()
            if self._collect(folder):
                self._hot_until = time.monotonic() + HOT_S
            hot = time.monotonic() < self._hot_until
            pause = FIRST_PAUSE_S if hot else min(LAST_PAUSE_S, pause * 1.3)
            if hot:
                self._never.wait(pause)
            else:
                self._awake.wait(pause)

    def _collect(self, folder: str) -> bool:
        """Announce the letters (request files) that have not been announced yet. Listing the folder
        makes a network file system update its cache.
        """
        try:
            names = {
                name for name in os.listdir(folder) if "@" in name and not name.startswith(".")
            }
        except OSError:
            return False
        self._announced &= names
        fresh = sorted(names - self._announced)
        for name in fresh:
            path = os.path.join(folder, name)
            try:
                with open(path, "rb") as file:
                    data = file.read(LETTER_LIMIT)
            except OSError:
                continue
            self._announced.add(name)
            self._send({"mail": path}, data)
        return bool(fresh)


def _make_removable(path: str) -> None:
    """Let this user list and change a folder and all folders below it, as far as possible."""
    with contextlib.suppress(OSError):
        os.chmod(path, 0o700)
        for folder, names, _ in os.walk(path):
            for name in names:
                if not os.path.islink(os.path.join(folder, name)):
                    os.chmod(os.path.join(folder, name), 0o700)


if __name__ == "__main__":
    assert isinstance(sys.stdin.buffer, io.BufferedReader)
    LoginHelper(sys.stdin.buffer, sys.stdout.buffer).serve()
