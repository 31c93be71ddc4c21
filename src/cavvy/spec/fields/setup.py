"""The field `setup`: commands that run on each node before the task, and the files that these
commands use.
"""

from cavvy.spec.fields.kinds import (
    FieldSpec,
    ListKind,
    ScalarKind,
    WrongValue,
    either,
    filled,
    read_text,
    section,
    text_kind,
)
from cavvy.spec.fields.paths import inner_path
from cavvy.spec.tree import ScalarNode


def _read_commands(node: ScalarNode) -> str:
    if node.plain and type(node.value) in (int, float):
        raise WrongValue(f"{node.text} is a number")
    return filled(read_text(node))


COMMANDS = ScalarKind(
    "shell commands",
    _read_commands,
    instead="write `|` after the key, and below it one command a line, without `-`",
)


_FILE = text_kind(
    "a file or folder within the working folder, such as requirements.txt", inner_path
)
_TABLE = section(
    "setup",
    lambda table: table.make(lambda run, uses=None: (run, uses)),
    run=FieldSpec(COMMANDS, required=True),
    uses=ListKind(_FILE),
)
# The value is a tuple of the commands and the files that the commands use.
SETUP = either(COMMANDS, lambda run: (run, None), _TABLE)
