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
        self._silent = self._migrates = False

    def note_silence(self, what: str = "no answer from the server yet") -> None:
        """Report that the server does not answer, or answers only that its database does not,
        unless this was reported already.
        """
        self._note(f"{what}; still waiting (see `cavvy server logs`)")

    def note_start(self) -> None:
        """Report that the server, which this client has started, needs more time than usual."""
        self._note("the server is starting, which can take a minute (`cavvy server logs`)")

    def note_migration(self) -> None:
        """Report that the server migrates its database, also if its slow start was reported."""
        if not self._migrates and self._report is not None:
            self._migrates = self._silent = True
            self._report(
                "the server is migrating its database, which can take minutes; still waiting (see "
                "`cavvy server logs`)"
            )

    def _note(self, text: str) -> None:
        if not self._silent and self._report is not None:
            self._silent = True
            self._report(text)

    def note_answer(self) -> None:
        """Report that the server answers, after a report that it did not."""
        if self._silent and self._report is not None:
            self._silent = False
            self._report("the server answers now")
