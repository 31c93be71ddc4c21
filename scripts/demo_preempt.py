"""Run the fire drill `remuda drill preempt NAME` once a job has done so many epochs; called by scripts/demo.sh."""

import json
import subprocess
import sys
import time


def main(name: str, epochs: int) -> int:
    for _ in range(2400):  # ten minutes, most of them for the first installation of torch
        shown = subprocess.run(["remuda", "status", name, "-o", "json"], capture_output=True, text=True, check=True)
        job = json.loads(shown.stdout)
        if job["phase"] in ("done", "failed", "stopped"):
            print(f"demo: {name} was {job['phase']} before it could be preempted", file=sys.stderr)
            return 1
        if any(node["progress"].get("done", 0) >= epochs for a in job["attempts"][-1:] for node in a["nodes"]):
            return subprocess.run(["remuda", "drill", "preempt", name, "--notice", "5s"], check=False).returncode
        time.sleep(0.25)
    print(f"demo: {name} made no progress for ten minutes", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
