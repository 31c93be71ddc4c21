"""Parts of logs and of commands' output, as the client yields them."""

from msgspec import Struct


class LogChunk(Struct, frozen=True, kw_only=True):
    """Bytes from the log of one rank. `attempt` is the number of the attempt that wrote them, and
    `offset` is the start of the next chunk.
    """

    data: bytes
    attempt: int
    offset: int
    over: bool  # the job has ended and the log is complete
    # (offset, time): the bytes from this offset on arrived at this time; empty unless requested
    times: list[tuple[int, float]] = []


class ExecChunk(Struct, frozen=True, kw_only=True):
    """Output of a command in the environment of a job; `exit_code` is set in the last chunk."""

    data: bytes
    exit_code: int | None
