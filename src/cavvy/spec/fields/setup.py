"""What is done before the task on each node, and which files that may depend on: `setup`."""

from cavvy.spec.fields.kinds import FieldSpec, ListKind, SectionSpec, either, hints_for, text_kind
from cavvy.spec.fields.paths import inner_path

_COMMANDS = text_kind("shell commands")
_FILE = text_kind("a file or folder of the working folder such as requirements.txt", inner_path)
_TABLE = SectionSpec(
    "setup",
    "What each node runs before, and which files that depends on.",
    (
        FieldSpec(
            "run", _COMMANDS, "The commands.", "pip install -r requirements.txt", required=True
        ),
        FieldSpec(
            "uses",
            ListKind(_FILE),
            "The files and folders that the commands need. They see only these, so a finished "
            "setup is reused until one of them changes; edits of other files do not matter. "
            "Without `uses` they see the whole folder, and any change in it repeats the setup.",
            "[requirements.txt, src/pkg/]",
            "the whole working folder",
        ),
    ),
    lambda table: table.make(lambda run, uses=None: (run, uses)),
    hints_for({"write `uses`": "files needs inputs cache_key", "write `run`": "commands script"}),
)
SETUP = either(_COMMANDS, lambda run: (run, None), _TABLE)  # the commands, and what they use
