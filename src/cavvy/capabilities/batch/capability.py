"""What the command for batches of rows contributes."""

from cavvy.frame.capability import Capability, Command

_TEXT = "Process the rows of files in shards, each exactly once, on many nodes."
CAPABILITY = Capability(
    name="batch",
    summary=_TEXT,
    commands=(
        Command(
            name="batch",
            place="cavvy.capabilities.batch.command:command",
            summary=_TEXT,
            section="Run and watch",
            after="run",
        ),
    ),
    docs=("guides/arrays.md",),
)
