"""What curves contribute."""

from cavvy.frame.capability import Capability, Command, ConsoleData, ConsolePage, OwnTables

_TEXT = "Show the curves of what a job's program reports: loss, accuracy and others."
_LOG_TEXT = "Report values from a job's script, so that they become curves."
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
        Command(
            name="log",
            place="cavvy.capabilities.curves.log_command:command",
            summary=_LOG_TEXT,
            section="Run and watch",
            after="curves",
        ),
    ),
    docs=("guides/curves.md",),
    routes=("cavvy.capabilities.curves.routes:router",),
    tables=OwnTables(
        "cavvy.capabilities.curves", of_attempts=("curves", "curve_params", "curve_examples")
    ),
    listeners=("cavvy.capabilities.curves.rows:add_steps",),
    pages=(
        ConsolePage("/runs", "cavvy.capabilities.curves.runs:make", "Runs", "/jobs", compares=True),
    ),
    data=(
        ConsoleData("/jobs/{project}/{name}/curves", "cavvy.capabilities.curves.data:make_data"),
        ConsoleData(
            "/jobs/{project}/{name}/examples", "cavvy.capabilities.curves.example_part:make_list"
        ),
        ConsoleData(
            "/jobs/{project}/{name}/examples/{example}",
            "cavvy.capabilities.curves.example_part:send",
        ),
        ConsoleData(
            "/groups/{project}/{name}/curves", "cavvy.capabilities.curves.data:make_group_data"
        ),
    ),
    static="cavvy.capabilities.curves",
    job_parts=(
        "cavvy.capabilities.curves.part:make",
        "cavvy.capabilities.curves.example_part:make",
    ),
    group_parts=("cavvy.capabilities.curves.part:make_of_group",),
)
