"""The code that the providers of managed notebooks share: traits, records of ended notebooks, and
the script that starts the agent. The service runs this script when a notebook's machine first
starts.
"""

import shlex
from collections.abc import Callable, Container
from datetime import datetime, timedelta

from cavvy.domain.values import replace
from cavvy.providers.managed.service import (
    HostList,
    JobRequest,
    JobState,
    ServiceJob,
    ServiceTraits,
)
from cavvy.providers.vm.cloud import BillEnd

RANK = "CAVVY_CONTAINER_RANK"  # the environment variable with a notebook's rank
_FOLDER = "/tmp/cavvy"  # the same folder as in containers
_SHOWN = timedelta(hours=6)  # the ends of deleted notebooks are remembered for this long
# A notebook is one job of one machine. The services do not document how long a machine that stops
# waits for its processes, so that value is an assumption. The script is a file, so its variables
# have no limit of their own.
NOTEBOOK_TRAITS = ServiceTraits(
    hosts=HostList(index=RANK),
    name_limit=63,
    unique_names=True,
    variable_limit=65536,
    stop_s=30,
    single=True,
    bill_ends=BillEnd.REPORTED,
)


class NotebookEnds:
    """Remembers the state that each notebook had when the notebook was first observed as off. The
    service changes a notebook's reported times until the notebook is deleted, and does not report
    deleted notebooks.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._off: dict[str, ServiceJob] = {}  # by id

    def __contains__(self, job: str) -> bool:
        return job in self._off

    def note(self, job: ServiceJob) -> ServiceJob:
        """Return the notebook that a reply describes. The end time and the reason are the values
        recorded when the notebook was first observed as off.
        """
        if job.state in (JobState.WAITING, JobState.RUNNING):
            self._off.pop(job.id, None)
            return job
        first = self._off.setdefault(job.id, job)
        return replace(first, state=job.state, started_at=job.started_at or first.started_at)

    def find(self, job: str) -> ServiceJob | None:
        """Return the recorded end of a notebook that the service no longer reports, or None if no
        end was recorded.
        """
        off = self._off.get(job)
        return None if off is None else replace(off, state=JobState.ENDED)

    def forget(self, listed: Container[str]) -> None:
        """Forget the notebooks that ended long ago and that the service no longer lists."""
        since = self._now() - _SHOWN
        self._off = {
            job: off
            for job, off in self._off.items()
            if job in listed or (off.ended_at is not None and off.ended_at > since)
        }


def make_start_script(
    request: JobRequest, programs: str, *, folder: str = _FOLDER, last: str = ""
) -> str:
    """Return the script that starts the agent as root. The script exits immediately, because the
    service waits until the script has exited. `programs` lists the folders of the service's own
    Jupyter, in the form of `PATH`. `folder` is the agent's folder, on the disk where the work runs.
    `last` is a shell command that runs once the agent has ended.
    """
    values = {**request.entry.environment, RANK: str(request.rank)}
    lines = [f"{name}={shlex.quote(text)}\nexport {name}" for name, text in values.items()]
    command = shlex.join(request.entry.command)
    if last:
        command = shlex.join(["/bin/sh", "-c", f"{command}; {last}"])
    return "\n".join(
        [
            "#!/bin/sh",
            *lines,
            f'CAVVY_FOLDER="${{CAVVY_FOLDER:-{folder}}}"\nexport CAVVY_FOLDER',
            f'PATH="$PATH:{programs}"\nexport PATH',
            f'setsid nohup {command} </dev/null >"$CAVVY_FOLDER.log" 2>&1 &',
            "",
        ]
    )
