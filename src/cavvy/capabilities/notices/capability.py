"""What notices contribute."""

from cavvy.frame.capability import Capability, Command, OwnTables

CAPABILITY = Capability(
    name="notices",
    summary="Send messages about jobs and budgets to Slack, Teams, mail and others.",
    commands=(
        Command(
            name="notify",
            place="cavvy.capabilities.notices.command:command",
            summary="Send messages about jobs and budgets to Slack, Teams, mail and others.",
            section="Account and clean up",
            after="budget",
        ),
    ),
    docs=("guides/costs.md",),
    routes=("cavvy.capabilities.notices.routes:router",),
    errors="cavvy.capabilities.notices",
    tables=OwnTables(
        "cavvy.capabilities.notices",
        of_projects=("notice_targets",),
        sealed=("notice_targets",),
        reseal="cavvy.capabilities.notices.rows:SqlNotices",
    ),
    reconcilers=("cavvy.capabilities.notices.sender:make_sender",),
    listeners=("cavvy.capabilities.notices.rows:add_notices",),
)
