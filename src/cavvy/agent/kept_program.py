"""A program that stays on its node while its gang is repaired, and goes on in the next attempt.

The program says `{"keeps": {"kept": 1}}` on the socket `$CAVVY_NOTICE` when it has made a copy of
itself that works, and can make another one. Its connection stays open. When the work must stop, the
agent sends `{"regroup": {}}` instead of a signal, and the copy ends. The copy may also end by
itself, since its connection to another rank is lost. In both cases, the program says
`{"apart": {"code": n, "error": "..."}}`: the exit code of the copy, and why its connection was
lost. The agent reports the end of the work, as if the program had exited, and answers
`{"stay": {}}`, or `{"leave": {}}` if nothing will follow. The work of the next attempt then begins
with `{"rejoin": {"env": {...}}}`: the variables that have changed, for the next copy.

Only a program whose checkpoints are on a storage that all nodes share is kept. All others get what
the next attempt restores on their node, and so must start again.
"""

from __future__ import annotations

import os
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import AgentConfig
    from .documents import WorkConfig
    from .notification_socket import NotificationListener, NotificationSocket
    from .step_runner import StepRunner

# the agent's records of an attempt, and what its task was told
RECORDS = ("claim", "log", "outbox", "started", "status", "exit.json", "undelivered")
TOLD = ("notice.json", "advice.json", "progress.json", "halted", "answer")


class KeptProgram(NamedTuple):
    """A program that waits for the next attempt, with the process in which it runs."""

    work: WorkConfig
    env: dict[str, str]  # the variables of its attempt, before its setup has changed them
    program_env: dict[str, str]  # the variables that it has
    steps: StepRunner
    socket: NotificationSocket
    program: NotificationListener

    def fits(self, work: WorkConfig) -> bool:
        """Return whether the work is the next attempt of the program's job."""
        same = (work.job_id, work.run, work.setup_key, work.image)
        mine = self.work
        return not self.program.closed and same == (
            mine.job_id,
            mine.run,
            mine.setup_key,
            mine.image,
        )

    def find_changes(self, env: dict[str, str]) -> dict[str, str]:
        """Return the variables in which the next attempt's differ."""
        return {name: value for name, value in env.items() if self.env.get(name) != value}


def clear_records(config: AgentConfig) -> None:
    """Remove the records of an attempt whose program is kept. The claim is removed first, so that
    a later agent sends no reports about the attempt."""
    from .work.trees import remove_tree

    for folder in dict.fromkeys((config.private, config.home)):
        for name in RECORDS + TOLD:
            if os.path.lexists(folder + "/" + name):
                remove_tree(folder + "/" + name)
