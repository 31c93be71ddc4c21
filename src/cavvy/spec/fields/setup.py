"""The field `setup`: commands that run on each node before the task, and the files that they
use.
"""

from cavvy.spec.fields.kinds import COMMANDS, FieldSpec, ListKind, either, section, text_kind
from cavvy.spec.fields.paths import inner_path

_FILE = text_kind("a file or folder of the working folder such as requirements.txt", inner_path)
_TABLE = section(
    "setup",
    lambda table: table.make(lambda run, uses=None: (run, uses)),
    run=FieldSpec(COMMANDS, required=True),
    uses=ListKind(_FILE),
)
# The value is (commands, files that they use).
SETUP = either(COMMANDS, lambda run: (run, None), _TABLE)
