"""What is done before the task on each node, and which files that may depend on: `setup`."""

from dataclasses import dataclass

from cavvy.spec.fields.kinds import (
    EitherKind,
    FieldSpec,
    ListKind,
    ScalarKind,
    SectionReader,
    SectionSpec,
    text_kind,
)
from cavvy.spec.fields.limits import inner_path


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupField:
    """Shell commands, and the paths that are all of the working folder that they see; None: the
    whole of it.
    """

    run: str
    uses: tuple[str, ...] | None = None


_COMMANDS = text_kind("shell commands")
RUN = FieldSpec(
    name="run",
    kind=_COMMANDS,
    help="The commands.",
    example="run: pip install -r requirements.txt",
    required=True,
)
USES = FieldSpec(
    name="uses",
    kind=ListKind(
        item=text_kind(
            "a file or folder of the working folder such as requirements.txt", inner_path
        )
    ),
    help="The files and folders that the commands need. They see these alone, so a finished setup "
    "is reused until one "
    "of them changes, whatever else is edited. Left out, they see the whole folder, and any change "
    "of it sets up anew.",
    example="uses: [requirements.txt, src/pkg/]",
    default="the whole working folder",
)


def _build(table: SectionReader) -> SetupField | None:
    run, uses = table.get(RUN), table.get(USES)
    return None if run is None else SetupField(run=run, uses=uses)


SETUP_TABLE = SectionSpec(
    path="setup",
    help="What each node runs before, and which files that depends on.",
    fields=(RUN, USES),
    build=_build,
    hints={
        "files": "write `uses`",
        "needs": "write `uses`",
        "inputs": "write `uses`",
        "cache_key": "write `uses`",
        "commands": "write `run`",
        "script": "write `run`",
    },
)
_SETUP_TEXT: ScalarKind[SetupField | None] = ScalarKind(
    words=_COMMANDS.words,
    parse=lambda node: SetupField(run=_COMMANDS.parse(node)),
    schema=_COMMANDS.schema,
)
SETUP_KIND: EitherKind[SetupField | None] = EitherKind(kinds=(_SETUP_TEXT, SETUP_TABLE))
