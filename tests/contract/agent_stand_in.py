"""Stands in for the agent in tests of the local provider: locks, says who it is, and leaves when
told.

`finish` in its folder ends it in order, SIGTERM too; `work` there (a shell command) is run beside
it first.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time

deliver = "--deliver" in sys.argv
with open(sys.argv[-1], encoding="utf-8") as file:
    config = json.load(file)
home = config.get("private") or config["home"]
lock = os.open(home + "/lock", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
with open(home + "/starts", "a", encoding="utf-8") as file:
    file.write("deliver\n" if deliver else "work\n")
terminated = []
signal.signal(signal.SIGTERM, lambda number, frame: terminated.append(number))
if os.path.exists(home + "/../../../work.sh") and not deliver:
    subprocess.Popen(["sh", home + "/../../../work.sh"], start_new_session=True)
while not terminated and not os.path.exists(home + "/finish") and not deliver:
    time.sleep(0.005)
code = 0 if not terminated else 143
with open(home + "/exit.tmp", "w", encoding="utf-8") as file:
    json.dump(
        {
            "outcome": "stopped" if terminated else "succeeded",
            "exit_code": code,
            "reason": "",
            "more": [1],
        },
        file,
    )
os.rename(home + "/exit.tmp", home + "/exit.json")
