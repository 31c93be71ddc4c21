"""Starts the embedded server as a background process and waits until it is ready."""

import os
import select
import subprocess
import sys
import time

from msgspec import Struct
from msgspec.json import decode

from cavvy import settings
from cavvy.client import file_limit
from cavvy.client.errors import StartFailed
from cavvy.client.state import ServerFile, is_migrating, read_server
from cavvy.client.transport import QUIET_S, Patience

start_process = subprocess.Popen  # tests replace it
_MODULE = "cavvy.server.embedded"
_TAIL_LINES = 12


class StartupReport(Struct, frozen=True, kw_only=True):
    """The report of a starting server to the process that started it. `state` is ready, busy or
    error.
    """

    state: str
    code: str = ""
    message: str = ""
    hint: str = ""


class _StartDeadline:
    """The end of the wait for a server, which moves while the server migrates its database."""

    def __init__(self, home: str, timeout_s: float) -> None:
        self.home, self._timeout_s = home, timeout_s
        self._until = time.monotonic() + timeout_s

    def left_s(self) -> float:
        if is_migrating(self.home):
            self._until = time.monotonic() + self._timeout_s
        return self._until - time.monotonic()


def launch(home: str, patience: Patience) -> ServerFile:
    """Start the server of this state folder, or wait for the server that another command is
    starting. If the start is slow, report the delay through `patience`. The time that a migration
    of the database takes is not limited. Raises StartFailed.
    """
    try:
        timeout_s = settings.load().whole("server.start_timeout_s")
    except settings.SettingsError as error:
        raise StartFailed(error.code, error.message, error.hint) from error
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StartFailed(
            "home-unusable",
            f"{home}: "
            + ("Not a directory" if isinstance(error, FileExistsError) else f"{error.strerror}"),
            "set CAVVY_HOME to a folder that you can write to",
        ) from error
    deadline = _StartDeadline(home, timeout_s)
    while True:
        word = _start_once(home, deadline, patience)
        server = read_server(home)
        if word.state in ("ready", "busy") and server is not None:
            return server
        if word.state == "error":
            raise StartFailed(word.code, word.message, word.hint)
        if deadline.left_s() <= 0:
            raise StartFailed(
                "server-start-timeout",
                f"the server did not start within {timeout_s} s",
                f"see {home}/server.log; raise server.start_timeout_s for a slow disk or a large "
                "database",
            )
        time.sleep(0.05)


def _start_once(home: str, deadline: "_StartDeadline", patience: Patience) -> StartupReport:
    log_path = os.path.join(home, "server.log")
    reader, writer = os.pipe()
    environment = {**os.environ, "CAVVY_HOME": home}
    if environment.get("CAVVY_CONFIG"):
        environment["CAVVY_CONFIG"] = os.path.abspath(
            os.path.expanduser(environment["CAVVY_CONFIG"])
        )
    try:
        with open(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            begin = log.tell()
            process = start_process(
                [sys.executable, "-P", "-m", _MODULE, "--ready-fd", str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment,
                pass_fds=(writer,),
                start_new_session=True,
            )
    except OSError as error:
        os.close(reader)
        if shortage := file_limit.describe_shortage(error):
            raise StartFailed(file_limit.CODE, shortage, file_limit.HINT) from error
        raise StartFailed(
            "server-start-failed", f"cannot start the server: {error}", f"look at {home}"
        ) from error
    finally:
        os.close(writer)
    try:
        word = _listen(reader, deadline, patience) or _last_words(
            process, log_path, begin, deadline
        )
    finally:
        os.close(reader)
        if process.poll() is None:
            process.returncode = 0  # so that Popen does not wait for the server, which continues
    return word


def _listen(reader: int, deadline: "_StartDeadline", patience: Patience) -> StartupReport | None:
    """Return the report of the starting server, or None if the server ended without a report."""
    data = b""
    while not data.endswith(b"\n"):
        left_s = deadline.left_s()
        if left_s <= 0:
            return StartupReport(state="late")
        if not select.select([reader], [], [], min(left_s, QUIET_S))[0]:
            if is_migrating(deadline.home):
                patience.note_migration()
            else:
                patience.note_start()
            continue
        part = os.read(reader, 65536)
        if not part:
            return None
        data += part
    return decode(data, type=StartupReport)


def _last_words(
    process: "subprocess.Popen[bytes]", log_path: str, begin: int, deadline: "_StartDeadline"
) -> StartupReport:
    try:
        code = process.wait(max(0.1, deadline.left_s()))
    except subprocess.TimeoutExpired:
        code = 0
    with open(log_path, "rb") as log:
        log.seek(begin)
        lines = log.read(1 << 20).decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
    tail = "\n".join(f"  {line}" for line in lines) or "  (no output)"
    return StartupReport(
        state="error",
        code="server-start-failed",
        message=f"the server ended with exit code {code} before it was ready; its log ends "
        f"with:\n{tail}",
        hint=f"the complete log is {log_path}",
    )
