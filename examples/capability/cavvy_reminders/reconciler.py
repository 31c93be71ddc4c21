"""Announces the reminders that are due."""

from datetime import timedelta

from cavvy.domain.events import Announcement
from cavvy.store.announcements import tell


class Reminders:
    waits_outside = False

    def __init__(self, parts):
        self._clock, (_, self._write) = parts.clock, parts.store.database

    def owns(self, key):
        return key == "reminders"

    async def unfinished(self):
        return ["reminders"]

    async def reconcile(self, key):
        now = self._clock.now()

        def announce(session):
            sql = "DELETE FROM reminders WHERE at <= ? RETURNING project, text"
            for project, text in session.run(sql, (int(now.timestamp()),)).fetchall():
                tell(session, [Announcement(event="reminder", project=project, text=text, at=now)])

        await self._write(announce)
        return timedelta(seconds=1)
