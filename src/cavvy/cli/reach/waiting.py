"""Says why a job that was just queued waits, for commands that do not follow the job."""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cavvy.client import ApiClient

_TELL_S = 0.5  # maximum seconds until the server has tried to place the job
_LOOK_S = 0.02


def find_wait(client: "ApiClient", project: str, name: str) -> str:
    """Return why a queued job does not start now, such as "waits for free capacity at local/here",
    or "" if it starts, or the server does not say so within `_TELL_S` seconds. The job is queued
    in any case, so an error of the server is no error of the command.
    """
    from cavvy.client import ApiError

    try:
        return _find(client, project, name)
    except ApiError:
        return ""


def _find(client: "ApiClient", project: str, name: str) -> str:
    until, pause = time.monotonic() + _TELL_S, _LOOK_S
    events = client.events(project, name).events
    began = next((each.text for each in reversed(events) if each.kind == "queued"), "")
    while (job := client.job(project, name)).phase == "queued":
        if job.reason not in ("", began):  # the first reason is the event's text
            return job.reason
        if time.monotonic() > until:
            place = job.queue_position
            return f"position {place} in the queue" if place else ""
        time.sleep(pause)
        pause *= 1.5
    return ""
