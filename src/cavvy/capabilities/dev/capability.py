"""What sessions of interactive work contribute."""

from cavvy.frame.capability import FIRST_ONE, Capability, Command

_TEXT = "Get a machine for interactive work: a shell, an editor or Jupyter."
CAPABILITY = Capability(
    name="dev",
    summary=_TEXT,
    commands=(
        Command(
            name="dev",
            place="cavvy.capabilities.dev.command:command",
            summary=_TEXT,
            section="Work on nodes",
            after=FIRST_ONE,
            first_after="stop",
        ),
    ),
    docs=("guides/notebooks.md", "concepts/dev-sessions.md"),
)
