"""Keeps track of the commands that users run in the environment of a job. Agents run these
commands; the server keeps their output in memory until users read it.

When the server stops, all running commands end. The server notifies the command-line tools that
wait for these commands; the tools start the commands again on the next server.
"""

import time

from cavvy.api.errors import ApiProblem
from cavvy.api.notifier import ChangeNotifier
from cavvy.domain.values import Struct, field

_UNREAD_BYTES = 4 * 1024 * 1024  # maximum unread bytes in each direction; the sender then waits
_PIECE = 256 * 1024  # maximum bytes of input in one answer
# seconds without a request for a session's output after which the user is considered gone
_ABANDONED_S = 90.0
# the same limit for a command; it is longer because a pager can keep the user's client waiting
_UNREAD_S = 3600.0
# seconds without a request from the agent after which the command counts as lost: an agent with a
# command sends a request at least every 25 s
_SILENT_S = 120.0
# If the user does not ask for longer than this, the server may have been unable to answer anybody,
# so earlier silence of the agent does not count.
_PAUSE_S = 30.0
_KEPT_EXECS = 64  # maximum number of ended commands that are kept


class JobExec(Struct, kw_only=True):
    """One command. `data` contains the command's output, beginning at the offset `start`."""

    id: str
    job_id: str
    gang: str
    rank: int
    command: list[str]
    # whether the command was sent to its agent, even if the agent has not confirmed it
    told: bool = False
    taken: bool = False  # whether the agent has answered, so that the command is not sent again
    start: int = 0
    data: bytearray = field(default_factory=bytearray)
    exit_code: int | None = None
    session: bool = False  # whether this is a remote session, which accepts input
    input: bytearray = field(default_factory=bytearray)
    input_start: int = 0
    input_ended: bool = False
    used_at: float = 0.0  # time of the user's last request, by the monotonic clock
    problem: str = ""  # the reason why the command was not started
    # whether the agent asks for input, and until when it was certainly not silent
    asks: bool = False
    heard_at: float = 0.0

    @property
    def abandoned(self) -> bool:
        """Whether the user has not asked for output for so long that the user must be gone."""
        limit_s = _ABANDONED_S if self.session else _UNREAD_S
        return time.monotonic() - self.used_at > limit_s

    @property
    def ignored(self) -> bool:
        """Whether no user will read the output of this command."""
        return not self.session and (self.input_ended or self.abandoned)


class JobExecs:
    """All commands of users since the server started."""

    def __init__(self, watch: ChangeNotifier) -> None:
        self.watch = self._watch = watch
        self._all: dict[str, JobExec] = {}

    def start(
        self,
        exec_id: str,
        job_id: str,
        gang: str,
        rank: int,
        command: list[str],
        *,
        session: bool = False,
    ) -> JobExec:
        """Register a command for an agent. The agent waits for orders in a long poll. After this
        call, the caller must make the server answer this long poll.
        """
        self._drop_old()
        made = JobExec(
            id=exec_id, job_id=job_id, gang=gang, rank=rank, command=command, session=session
        )
        made.used_at = time.monotonic()
        self._all[exec_id] = made
        return made

    def wanted(self, gang: str, rank: int) -> list[JobExec]:
        """Return the commands to which the agent of this rank has not responded yet."""
        return [
            each
            for each in self._all.values()
            if each.gang == gang and each.rank == rank and not each.taken and each.exit_code is None
        ]

    def untold(self, gang: str, rank: int) -> bool:
        """Return whether a command is waiting to be sent to the agent of this rank."""
        return any(not each.told for each in self.wanted(gang, rank))

    def refuse_sessions(self, gang: str, rank: int, protocol: int) -> None:
        """End the sessions of this rank and tell their users that the rank's agent is too old for
        sessions.
        """
        for each in self.wanted(gang, rank):
            if each.session:
                each.exit_code = 255
                each.problem = (
                    f"the agent of this node is too old for sessions (it uses protocol {protocol})"
                )
                self._watch.wake(each.id)

    def put(
        self, exec_id: str, gang: str, rank: int, offset: int, data: bytes, exit_code: int | None
    ) -> None:
        """Accept output from an agent. Repeated bytes and unknown commands are ignored."""
        found = self._all.get(exec_id)
        if found is None or (found.gang, found.rank) != (gang, rank):
            return
        found.taken, found.heard_at = True, time.monotonic()
        end = found.start + len(found.data)
        found.data += data[max(0, end - offset) :]
        if found.ignored:
            found.start += len(found.data)
            found.data.clear()
        if exit_code is not None:
            found.exit_code = exit_code
        self._watch.wake(exec_id)

    def full(self, exec_id: str) -> bool:
        """Return whether the agent must wait before it sends more output, because too much output
        is unread.
        """
        found = self._all.get(exec_id)
        return (
            found is not None
            and found.exit_code is None
            and len(found.data) >= _UNREAD_BYTES
            and not found.ignored
        )

    def taken(self, found: JobExec, offset: int) -> None:
        """Record that the user has read the output up to `offset`, and drop this output."""
        now = time.monotonic()
        if now - found.used_at > _PAUSE_S:
            found.heard_at = now
        found.used_at = now
        if offset > found.start:
            del found.data[: offset - found.start]
            found.start = offset
            self._watch.wake(found.id)

    def end_lost(self, found: JobExec) -> bool:
        """End a running command whose agent has been silent for too long. Return whether the
        command was ended. Another server has told the agent to end the command if this server was
        absent for a longer time, for example paused.
        """
        silent_s = time.monotonic() - found.heard_at
        if found.exit_code is not None or not found.asks or silent_s < _SILENT_S:
            return False
        found.exit_code = 255
        self._watch.wake(found.id)
        return True

    def put_input(self, found: JobExec, offset: int, data: bytes, ended: bool) -> int:
        """Accept input from the user. The end of the input means that the user disconnects. Returns
        the offset of the next expected byte.
        """
        found.used_at = time.monotonic()
        end = found.input_start + len(found.input)
        if offset <= end and len(found.input) < _UNREAD_BYTES:
            found.input += data[end - offset :]
            found.input_ended = found.input_ended or ended
        self._watch.wake(found.id)
        return found.input_start + len(found.input)

    def input_of(self, exec_id: str, gang: str, rank: int, offset: int) -> tuple[bytes, bool]:
        """Return the command's input from `offset` on, and whether the input has ended."""
        found = self._all.get(exec_id)
        if found is None or (found.gang, found.rank) != (gang, rank) or found.exit_code is not None:
            return b"", True
        found.asks, found.heard_at = True, time.monotonic()
        if offset > found.input_start:
            del found.input[: offset - found.input_start]
            found.input_start = offset
            self._watch.wake(found.id)
        data = bytes(found.input[:_PIECE])
        return data, found.abandoned or (found.input_ended and len(data) == len(found.input))

    def get(self, exec_id: str, job_id: str) -> JobExec:
        """Return the command with this ID if it belongs to this job. Raises ApiProblem if the job
        has no command with this ID.
        """
        found = self._all.get(exec_id)
        if found is None or found.job_id != job_id:
            raise ApiProblem("exec-not-found", f"this job has no running command {exec_id}")
        return found

    def end_with(self, job_id: str) -> None:
        """End the commands of a job that has lost its nodes, and wake the requests that wait for
        the commands' output.
        """
        for each in self._all.values():
            if each.job_id == job_id and each.exit_code is None:
                each.exit_code = 255
                self._watch.wake(each.id)

    def _drop_old(self) -> None:
        ended = [each.id for each in self._all.values() if each.exit_code is not None]
        for exec_id in ended[: max(0, len(ended) - _KEPT_EXECS)]:
            del self._all[exec_id]
