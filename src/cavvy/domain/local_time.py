"""Moments in the local time zone of this process, for every text that shows one."""

from datetime import UTC, datetime


def to_local(moment: datetime) -> datetime:
    """Return the moment in local time, or in UTC if the zone or the year has no local time: `TZ`
    may state an offset of a day or more, such as UTC+25, which `datetime` refuses.
    """
    try:
        return moment.astimezone()
    except (ValueError, OverflowError, OSError):
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
