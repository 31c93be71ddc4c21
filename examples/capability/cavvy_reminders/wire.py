from cavvy.client.paths import project_path
from cavvy.client.wire import Answer, Ask


class Reminder(Answer, frozen=True, kw_only=True):
    text: str
    at_s: int  # Unix time


class ReminderAsk(Ask, frozen=True, kw_only=True):
    text: str
    after_s: int


def list_reminders(client, project):
    return client.ask(f"{project_path(project)}/reminders", list[Reminder])


def add_reminder(client, project, ask):
    return client.ask(f"{project_path(project)}/reminders", Reminder, ask)
