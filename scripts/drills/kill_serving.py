"""Two services answer requests while their gateway, server and replicas are killed. No answer may
be wrong, no process may be left over, and each bill must equal a recount.

    python scripts/drills/kill_serving.py --minutes 5

Every few seconds, one of the three is killed (SIGKILL), chosen at random. Each answer must name the
service and the number that was asked for. A request that was in a killed process may end without
an answer, or with 502 if its replica was lost twice; no other status is right. Replicas run on this
machine, by the provider `local`. The exit code is 1 if anything is wrong.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.system.trust import User, check_clean, user_at  # noqa: E402
from tests.waits import wait_until  # noqa: E402

_SERVICES = ("first", "second")
_CALLERS = 4  # of each service
_PROGRAM = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = (sys.argv[1] + self.path).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Echo).serve_forever()
"""
_TASK = """
name: NAME
run: exec python3 drill_echo.py NAME $PORT
workdir: .
resources: {cpu: 0.1, memory: 32MiB}
service: {port: 8000, replicas: {min: 2, max: 2}, concurrency: 8, timeouts: {queue: 2m}}
"""
_RECOUNT = """
SELECT j.id, j.spent, COALESCE((SELECT SUM(c.amount) FROM charges c WHERE c.job_id = j.id), 0)
FROM jobs j
"""


class ServiceCallers:
    """Threads that call a service until they are stopped. `seen` counts the outcomes."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(_CALLERS)]
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _run(self, caller: int) -> None:
        number = 0
        while not self._stop.wait(0.01):
            number += 1
            self._ask(f"/{caller}-{number}")

    def _ask(self, path: str) -> None:
        try:
            with urlopen(self.url + path, timeout=180) as answer:
                found = answer.read().decode()
        except HTTPError as error:
            found = f"{error.code} {error.read()[:200]!r}"
            self.seen[str(error.code)] += 1
            if error.code != 502:
                self.wrong.append(f"{self.name}{path}: {found}")
            return
        except (OSError, HTTPException):
            self.seen["no answer"] += 1  # the gateway was killed
            time.sleep(0.1)
            return
        self.seen["right"] += 1
        if found != self.name + path:
            self.seen["right"] -= 1
            self.wrong.append(f"{self.name}{path}: {found!r}")


def find_processes(word: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(int(pid))
    return found


def kill_one(user: User, chance: random.Random) -> str:
    what = chance.choice(("gateway", "server", "replica"))
    if what == "server":
        user.kill_server()
        user.api.health()  # the next command starts another one
        return what
    config = str(user.home / "gateway" / "gateway.json")
    own = set(user.worked())
    pids = find_processes(config)
    if what == "replica":
        pids = [pid for pid in find_processes("drill_echo.py") if pid in own]
    if pids:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(pids), signal.SIGKILL)
    return what


def recount(user: User) -> list[str]:
    with sqlite3.connect(user.home / "cavvy.db") as database:
        rows = database.execute(_RECOUNT).fetchall()
    return [
        f"job {job}: spent {spent}, recount {sum_}" for job, spent, sum_ in rows if spent != sum_
    ]


def run(minutes: float, seed: int) -> dict[str, object]:
    chance, kills = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder, user_at(Path(folder)) as user:
        user.settings("[providers.local]\nprice_usd_hr = 3.6\n")
        (user.work / "drill_echo.py").write_text(_PROGRAM)
        callers = []
        for name in _SERVICES:
            file = user.work / f"{name}.yaml"
            file.write_text(_TASK.replace("NAME", name))
            url = user.json("serve", "--yes", file.name)["url"]
            callers.append(ServiceCallers(name, url))
        wait_until(lambda: all(each.seen["right"] for each in callers))
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            time.sleep(chance.uniform(1.0, 5.0))
            kills[kill_one(user, chance)] += 1
        before = [each.seen["right"] for each in callers]
        wait_until(  # all recovers
            lambda: all(c.seen["right"] > n + 20 for c, n in zip(callers, before, strict=True))
        )
        for each in callers:
            each.stop()
        for name in _SERVICES:
            user.cli("unserve", name)
        check_clean(user)
        wrong = [line for each in callers for line in each.wrong]
        bills = recount(user)
        user.cli("server", "stop", code=None)
        seen = sum((each.seen for each in callers), Counter[str]())
    return {"kills": dict(kills), "requests": dict(seen), "wrong": wrong[:20], "bills": bills}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = run(options.minutes, options.seed)
    print(json.dumps(found, indent=2))
    sys.exit(1 if found["wrong"] or found["bills"] else 0)


if __name__ == "__main__":
    main()
