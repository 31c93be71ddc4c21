"""What curves contribute."""

from cavvy.frame.capability import Capability, Command, OwnTables

_TEXT = "Show the curves of what a job's program reports: loss, accuracy and others."
CAPABILITY = Capability(
    name="curves",
    summary=_TEXT,
    commands=(
        Command(
            name="curves",
            place="cavvy.capabilities.curves.command:command",
            summary=_TEXT,
            section="Run and watch",
            after="logs",
        ),
    ),
    docs=("guides/curves.md",),
    routes=("cavvy.capabilities.curves.routes:router",),
    tables=OwnTables("cavvy.capabilities.curves", of_attempts=("curves",)),
    listeners=("cavvy.capabilities.curves.rows:add_steps",),
    job_parts=("cavvy.capabilities.curves.part:make",),
    group_parts=("cavvy.capabilities.curves.part:make_of_group",),
)
