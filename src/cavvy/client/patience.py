"""Defines how long a client waits for a server that does not answer, and reports these waits to the
user.
"""

from collections.abc import Callable

QUIET_S = 3.0  # seconds without an answer after which the silence is reported


class Patience:
    """Limits and reports waits for a server. All connections of one command share one object of
    this class. `limit_s` is the time for which a request is repeated while no server answers.
    `report` is called with a sentence when the server stops answering, and when the server answers
    again.
    """

    def __init__(self, limit_s: float = 0.0, report: Callable[[str], None] | None = None) -> None:
        self.limit_s = limit_s
        self._report = report
        self._silent = False

    def note_silence(self, what: str = "no answer from the server yet") -> None:
        """Report that the server does not answer, or answers only that its database does not,
        unless this was reported already.
        """
        if not self._silent and self._report is not None:
            self._silent = True
            self._report(f"{what}; still waiting (see `cavvy server logs`)")

    def note_answer(self) -> None:
        """Report that the server answers again, after a report of `note_silence`."""
        if self._silent and self._report is not None:
            self._silent = False
            self._report("the server answers now")
