"""Commands that run before the task on each node, and the files that they may depend on:
`setup`."""

from cavvy.spec.fields.kinds import FieldSpec, ListKind, either, section, text_kind
from cavvy.spec.fields.paths import inner_path

_COMMANDS = text_kind("shell commands")
_FILE = text_kind("a file or folder of the working folder such as requirements.txt", inner_path)
_TABLE = section(
    "setup",
    lambda table: table.make(lambda run, uses=None: (run, uses)),
    run=FieldSpec(_COMMANDS, required=True),
    uses=ListKind(_FILE),
)
SETUP = either(
    _COMMANDS, lambda run: (run, None), _TABLE
)  # the commands, and the files that they use
