"""A server that a test starts lives until the test process ends, whichever thread asked for it."""

import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.system.tied import start_tied

ROOT = Path(__file__).parents[3]

PROGRAM = """
import os, sys
from tests.system.tied import start_tied
print(start_tied(["sleep", "600"]).pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_server_outlives_the_thread_that_asked_for_it() -> None:
    found = []
    asked = threading.Thread(target=lambda: found.append(start_tied(["sleep", "600"])))
    asked.start()
    asked.join()
    (server,) = found
    try:
        try:
            code = server.wait(0.5)
        except subprocess.TimeoutExpired:
            code = None
        assert code is None
    finally:
        server.kill()
        server.wait()


def test_a_server_ends_with_a_killed_test_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    status = Path(f"/proc/{int(ended.stdout)}/stat")
    while status.exists() and status.read_text().rpartition(") ")[2][0] != "Z":
        time.sleep(0.02)
