"""The result of reading a task file, which may be the file of another tool: its tasks, and the keys
that the tasks cannot represent.
"""

from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct

# The commands for a file without commands: the job waits until it is stopped.
WAIT = """\
trap 'exit 143' TERM
while :; do sleep 3600 & wait $!; done
"""


CAVVY = "Cavvy"  # the `kind` of a file that is Cavvy's own


class KeptKey(Struct, frozen=True, kw_only=True):
    """One key of another tool's file that a task cannot represent.

    `refused` means that the work would not run as intended without this key, so the file cannot be
    run. `until_submitted` means that only `cavvy run` accepts the key, because the command
    determines the missing value when it submits the file.
    """

    line: int
    column: int
    key: str  # the key, with its parent keys, separated by dots
    reason: str
    refused: bool = False
    until_submitted: bool = False

    def __str__(self) -> str:
        return f"line {self.line}: `{self.key}`: {self.reason}"


class LocalPath(Struct, frozen=True, kw_only=True):
    """A local file or folder that is submitted together with the working folder.

    `source` is the path as written in the file. `inside` is the path in the snapshot of the working
    folder.
    """

    source: str
    inside: str


class Translation(Struct, frozen=True, kw_only=True):
    """The translation of another tool's file.

    `tasks` is empty if the file describes no work (for example a fleet or a volume), and has
    several entries for a pipeline or a job group. The `run` and `setup` of a task contain the
    author's original text. `task_files.load_task` makes the task ready to run.

    `own_folder` is the folder that is submitted although the file does not say so, relative to the
    folder of the file, or "".
    `notes` are remarks for the user about what is submitted.
    """

    kind: str  # the name of the tool
    what: str  # the kind of thing that the file describes, such as a task, a service or a fleet
    tasks: tuple[TaskSpec, ...] = ()
    kept: tuple[KeptKey, ...] = ()
    before: str = ""  # commands to insert before `run`
    after: str = ""  # commands to insert after `run`
    local: tuple[LocalPath, ...] = ()
    own_folder: str = ""
    guess: str = ""  # for which tool the file was read and why; "" for Cavvy's own files
    notes: tuple[str, ...] = ()
    takes_folder: bool = False  # it runs in the current folder, as with its tool's own command

    @property
    def task(self) -> TaskSpec | None:
        """The task, or None if the file describes no task or several tasks."""
        return self.tasks[0] if len(self.tasks) == 1 else None

    @property
    def refused(self) -> tuple[KeptKey, ...]:
        """The keys that prevent the file from being run, or () if the file can be run."""
        return tuple(each for each in self.kept if each.refused)
