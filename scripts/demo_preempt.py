"""Run the fire drill `cavvy drill preempt` on the job that the demo starts next, once it has done
so many epochs.

Called by scripts/demo.sh with the id of the newest job before it (ids grow with time) and the
number of epochs. It says nothing where all goes well, since the terminal belongs to `cavvy run`.
"""

import json
import subprocess
import sys
import time
from typing import Any

_TRIES = 4800  # twenty minutes, most of them for the first installation of torch


def main(last: str, epochs: int) -> int:
    for _ in range(_TRIES):
        time.sleep(0.25)
        job = _newer(last)
        if job is None:
            continue
        if job["phase"] in ("done", "failed", "stopped"):
            print(
                f"demo: {job['name']} was {job['phase']} before it could be preempted",
                file=sys.stderr,
            )
            return 1
        nodes = _cavvy("status", job["name"])["attempts"][-1:]
        if any(
            node["progress"].get("done", 0) >= epochs
            for attempt in nodes
            for node in attempt["nodes"]
        ):
            drill = ["cavvy", "drill", "preempt", job["name"], "--notice", "5s"]
            return subprocess.run(drill, check=False, stdout=subprocess.DEVNULL).returncode
    print("demo: the job made no progress for twenty minutes", file=sys.stderr)
    return 1


def _newer(last: str) -> dict[str, Any] | None:
    jobs = [job for job in _cavvy("ps", "--limit", "1") if job["id"] > last]
    return jobs[0] if jobs else None


def _cavvy(*arguments: str) -> Any:
    shown = subprocess.run(
        ["cavvy", *arguments, "-o", "json"], capture_output=True, text=True, check=True
    )
    return json.loads(shown.stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
