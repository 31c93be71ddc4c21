"""Run the drill `cavvy drill preempt` on the next job that the demo starts, after the job has
completed the given number of epochs.

Called by scripts/demo.sh with the number of epochs and the id of the newest earlier job (ids grow
with time). The script ends with the job and has no time limit, because a slow machine needs minutes
to install torch. It prints only problems, because `cavvy run` uses the terminal.
"""

import sys
import time

from cavvy.client import connect
from cavvy.client.wire import JobDetail

_ENDED = ("done", "failed", "stopped")


def main(last: str, epochs: int) -> int:
    with connect() as client:
        while True:
            time.sleep(0.1)
            newest = next(iter(client.jobs(limit=1).jobs), None)
            if newest is None or newest.id <= last:
                continue
            job = client.job(newest.project, newest.name)
            if job.phase in _ENDED:
                text = f"demo: {job.name} was {job.phase} before its machine could be taken away"
                print(text, file=sys.stderr)
                return 0
            if _done(job) >= epochs:
                client.drill_preempt(job.project, job.name, notice_s=5)
                return 0


def _done(job: JobDetail) -> float:
    """The number of epochs that the newest attempt has completed."""
    nodes = job.attempts[-1].nodes if job.attempts else []
    return max((float(node.progress.get("done", 0)) for node in nodes), default=0.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
