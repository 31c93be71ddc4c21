"""Adds and lists reminders."""

from cavvy.api.app_state import AppState
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path
from cavvy.domain.accounts import Permission
from cavvy_reminders.wire import Reminder, ReminderAsk

router = RouteGroup("reminders", prefix="/v1/projects/{project}/reminders")


@router.get("", rule=in_path(Permission.VIEW))
async def list_all(app_state: AppState, project: ProjectPath) -> list[Reminder]:
    """List a project's reminders."""
    sql = "SELECT text, at FROM reminders WHERE project = ?"
    rows = await app_state.store.database[0](lambda s: s.run(sql, (project,)).fetchall())
    return [Reminder(text=text, at_s=at) for text, at in rows]


@router.post("", rule=in_path(Permission.RUN))
async def add(app_state: AppState, project: ProjectPath, ask: ReminderAsk) -> Reminder:
    """Add a reminder."""
    made = Reminder(text=ask.text, at_s=int(app_state.now().timestamp()) + ask.after_s)
    sql, values = "INSERT INTO reminders VALUES (?, ?, ?)", (project, made.at_s, ask.text)
    await app_state.store.database[1](lambda s: s.run(sql, values))
    return made
