"""What reminders contribute."""

from cavvy.frame.capability import Capability, Command, ConsolePage, OwnTables

_TEXT = "Be reminded of something at a time."
CAPABILITY = Capability(
    name="reminders",
    summary=_TEXT,
    commands=(Command("remind", "cavvy_reminders.command:command", _TEXT, "Run and watch", "ps"),),
    tables=OwnTables("cavvy_reminders", of_projects=("reminders",)),
    routes=("cavvy_reminders.routes:router",),
    reconcilers=("cavvy_reminders.reconciler:Reminders",),
    pages=(ConsolePage("/reminders", "cavvy_reminders.page:make", "Reminders"),),
    events=("reminder",),
)
