"""The parts of the demo that look: a fire drill at the right moment, and a check of each step.

Called by scripts/demo.sh as `demo_checks.py CHECK ARGUMENT...`. A check exits with 1 and says what
did not happen; what it found is one line, if the screen does not show it.
"""

import re
import subprocess
import sys
import time
from itertools import pairwise

from cavvy.client import ApiClient, connect
from cavvy.client.wire import JobDetail

_ENDED = ("done", "failed", "stopped")
_SAVED = re.compile(r"asked to leave: saved at (epoch \d+, step \d+)")
_RESUMED = re.compile(r"resumed at (epoch \d+, step \d+)")


def main(check: str, *arguments: str) -> int:
    if check == "plan":
        return _check_plan(*arguments)
    with connect() as client:
        checks = {"newest": _newest, "name": _name, "preempt": _preempt}
        checks |= {"resumed": _resumed, "events": _events, "bill": _bill}
        if wrong := checks[check](client, *arguments):
            print(f"demo: {wrong}", file=sys.stderr)
            return 1
    return 0


def _check_plan(task: str) -> int:
    """The plan has offers on spot and on demand."""
    command = ["cavvy", "plan", task, "-o", "json"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if missing := [each for each in ("spot", "on-demand") if f'"{each}"' not in text]:
        print(f"demo: the plan has no offer {' and '.join(missing)}", file=sys.stderr)
        return 1
    return 0


def _newest(client: ApiClient) -> str:
    """Print the id of the newest job, or nothing; ids grow with time."""
    print(next((job.id for job in client.jobs(limit=1).jobs), ""))
    return ""


def _name(client: ApiClient, last: str) -> str:
    """Print the name of the job that was submitted after `last`."""
    newest = next(iter(client.jobs(limit=1).jobs), None)
    if newest is None or newest.id <= last:
        return "no job was submitted"
    print(newest.name)
    return ""


def _preempt(client: ApiClient, last: str, epochs: str) -> str:
    """Run `cavvy nodes drill preempt` on the job after `last`, once it has done the epochs.
    There is no time limit, because a slow machine needs minutes for the setup.
    """
    while True:
        time.sleep(0.1)
        newest = next(iter(client.jobs(limit=1).jobs), None)
        if newest is None or newest.id <= last:
            continue
        job = client.job(newest.project, newest.name)
        if job.phase in _ENDED:
            return f"{job.name} was {job.phase} before its machine could be taken away"
        if _done(job) >= int(epochs):
            client.drill_preempt(job.project, job.name, notice_s=5)
            return ""


def _done(job: JobDetail) -> float:
    """The number of epochs that the newest attempt has completed."""
    nodes = job.attempts[-1].nodes if job.attempts else []
    return max((float(node.progress.get("done", 0)) for node in nodes), default=0.0)


def _resumed(client: ApiClient, name: str) -> str:
    """The second attempt began where the first one ended, and the weights are those of a training
    that nothing has disturbed."""
    job, log = client.job("default", name), _log(client, name)
    saved, resumed = _SAVED.findall(log), _RESUMED.findall(log)
    if job.phase != "done" or len(job.attempts) != 2:
        return f"{name} is {job.phase} after {len(job.attempts)} attempts, not done after 2"
    if len(saved) != 1 or saved != resumed:
        return f"{name} saved at {saved} and resumed at {resumed}"
    print(f"Resumed exactly where the first attempt had saved: {saved[0]}.")
    weights = re.findall(r"^weights (\w+)", log, re.MULTILINE)
    if not weights:
        return ""  # a task whose sums depend on the machine tells none
    command = ["cavvy", "rerun", name, "--detach"]
    subprocess.run(command, capture_output=True, check=True)
    other = next(iter(client.jobs(limit=1).jobs)).name
    _watch(client, other)
    if (undisturbed := re.findall(r"^weights (\w+)", _log(client, other), re.MULTILINE)) != weights:
        return f"the weights are {weights}; without a loss they are {undisturbed}"
    print(f"A second run without a loss ended with the same weights: {weights[0]}.")
    return ""


def _watch(client: ApiClient, name: str) -> None:
    """Until the job has ended, show on a terminal how far it is."""
    while (job := client.job("default", name)).phase not in _ENDED:
        if sys.stdout.isatty():
            text = f"\rThe same training without a loss: {_done(job):.0f} epochs"
            print(text, end="", flush=True)
        time.sleep(0.2)
    if sys.stdout.isatty():
        print("\r\x1b[K", end="")


def _log(client: ApiClient, name: str) -> str:
    return b"".join(client.logs("default", name)).decode()


def _events(client: ApiClient, name: str) -> str:
    """The loss and both starts are told, each with its reason."""
    kinds = [event.kind for event in client.events("default", name).events]
    if kinds.count("running") != 2 or "notice" not in kinds or kinds[-1] not in ("done", "billed"):
        return f"the events of {name} are {' '.join(kinds)}"
    return ""


def _bill(client: ApiClient, name: str) -> str:
    """Each second of a node is charged once, and the sum is the total."""
    cost = client.cost("default", name)
    if (
        not cost.total_micros
        or sum(each.amount_micros for each in cost.charges) != cost.total_micros
    ):
        return f"the charges of {name} do not add up to {cost.total_micros}"
    spells = sorted((each.since, each.until) for each in cost.charges if each.kind == "node")
    if any(end > begin for (_, end), (begin, _) in pairwise(spells)):
        return f"a second of {name} is charged twice"
    return ""


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main(*sys.argv[1:]))
