# ruff: noqa: E501  # each program is one line of a table
"""Runs 20 programs that hang, 40 sound ones that compute and 24 that wait, and lets the real py-spy and the
rule of `limits.stuck` judge each.

    python scripts/stuck_drill.py              # all, 6 at a time
    python scripts/stuck_drill.py lock spin    # those whose names contain one of these words

A hang counts as found if the reason names its rank and line. It is ended only if it is known to be
one: others wait for it, or nothing can wake it. A sound program must not be ended. Programs of several ranks need `torch`; without it, they are said
to have not run. No server is needed: what it would decide is decided by the same function.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from cavvy.agent.work.stacks import take_stacks
from cavvy.control.decide.failures import STACKS, find_behind, is_hopeless
from cavvy.domain.jobs import Node, NodePhase, Order, RankStack, StackReport

GANG = """
import os, sys, time, threading
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", os.environ["STORE"], rank=rank, world_size=2)
value = torch.ones(4)
dist.all_reduce(value)
"""
LOADER = """
import time, threading, torch
from torch.utils.data import DataLoader, Dataset
class Items(Dataset):
    def __len__(self): return 10**9
    def __getitem__(self, at):
        if at > 8:
            ITEM
        return torch.ones(1)
if __name__ == "__main__":
    loader = iter(DataLoader(Items(), num_workers=2))
    print("ready", flush=True)
    while True:
        next(loader)
"""
HANGS = {  # a program, and the mark of the line that hangs; "" for any
    "lock-twice": "import threading\nlock = threading.Lock()\nlock.acquire()\nREADY\nlock.acquire()  # HERE",
    "lock-in-function": "import threading\nlock = threading.Lock()\ndef take():\n    lock.acquire()\n    lock.acquire()  # HERE\nREADY\ntake()",
    "two-locks": "import threading, time\na, b = threading.Lock(), threading.Lock()\ndef other():\n    b.acquire()\n    time.sleep(1)\n    a.acquire()\nthreading.Thread(target=other, daemon=True).start()\na.acquire()\ntime.sleep(.5)\nREADY\nb.acquire()  # HERE",
    "event": "import threading\nREADY\nthreading.Event().wait()  # HERE",
    "condition": "import threading\nc = threading.Condition()\nwith c:\n    READY\n    c.wait()  # HERE",
    "queue": "import queue\nREADY\nqueue.Queue().get()  # HERE",
    "join": "import threading\nt = threading.Thread(target=threading.Event().wait, daemon=True)\nt.start()\nREADY\nt.join()  # HERE",
    "pipe": "import os\nr, w = os.pipe()\nREADY\nos.read(r, 1)  # HERE",
    "socket": "import socket\na, b = socket.socketpair()\nREADY\na.recv(1)  # HERE",
    "accept": "import socket\ns = socket.create_server(('127.0.0.1', 0))\nREADY\ns.accept()  # HERE",
    "full-pipe": "import os\nr, w = os.pipe()\nREADY\nwhile True:\n    os.write(w, b'x' * 4096)  # HERE",
    "fifo": "import os, tempfile\np = tempfile.mkdtemp() + '/f'\nos.mkfifo(p)\nREADY\nopen(p)  # HERE",
    "flock": "import fcntl, tempfile\na = tempfile.NamedTemporaryFile()\nb = open(a.name)\nfcntl.flock(a, 2)\nREADY\nfcntl.flock(b, 2)  # HERE",
    "sleep-in-callback": "import time\ndef callback():\n    time.sleep(10**6)  # HERE\nREADY\n[f() for f in [callback]]",
    "child-sleeps": "import subprocess\nREADY\nsubprocess.run(['sleep', '600'])  # HERE",
    "asyncio": "import asyncio\nasync def main():\n    READY\n    await asyncio.Event().wait()\nasyncio.run(main())  # HERE",
    "stopped-child": "import subprocess, signal, os\np = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\nos.kill(p.pid, signal.SIGSTOP)\nREADY\np.stdout.read(1)  # HERE",
    "loader": LOADER.replace("ITEM", "threading.Event().wait()  # HERE"),
    "gang-sleeps": GANG
    + "READY\nif rank == 1:\n    time.sleep(10**6)  # HERE\ndist.all_reduce(value)",
    "gang-spins": GANG
    + "READY\nif rank == 1:\n    while True: rank = rank  # HERE\ndist.all_reduce(value)",
}
LOOPS = {
    "pass": "pass",
    "count": "n = n + 1",
    "float": "n = n * 1.0001 % 7",
    "text": "n = len(str(n)) + 1",
    "list": "n = sum(range(1000))",
    "sort": "n = len(sorted(range(5000), key=lambda v: -v))",
    "hash": "n = hash(str(n))",
    "pow": "n = pow(3, 5000, 10**50 + 1)",
    "regex": "n = len(__import__('re').findall('a+b', 'ab' * 999))",
    "json": "n = len(__import__('json').dumps([n] * 500))",
    "sha": "n = len(__import__('hashlib').sha256(bytes(2**22)).digest())",
    "zlib": "n = len(__import__('zlib').compress(bytes(2**22)))",
    "gc": "n = __import__('gc').collect()",
}
SOUND = {
    **{f"top-{k}": f"n = 1\nREADY\nwhile True: {v}" for k, v in LOOPS.items()},
    **{
        f"function-{k}": f"def f():\n    n = 1\n    while True: {v}\nREADY\nf()"
        for k, v in LOOPS.items()
    },
    "one-native-call": "import hashlib\nREADY\nhashlib.pbkdf2_hmac('sha256', b'a', b'b', 2**31 - 1)",
    "big-power": "READY\nx = 7 ** (10 ** 8)",
    "generator": "READY\nsum(i for i in range(10**12))",
    "recursion": "def f(n): return 1 if n < 2 else f(n - 1) + f(n - 2)\nREADY\nf(60)",
    "exec": "READY\nexec('while True: pass')",
    "no-threading": "READY\nn = 0\nwhile True:\n    n += 1",
    "child-computes": "import subprocess, sys\nREADY\nsubprocess.run([sys.executable, '-c', 'while True: pass'])",
    "shell-computes": "import subprocess\nREADY\nsubprocess.run(['sh', '-c', 'while :; do :; done'])",
    "pipe-from-child": "import subprocess\np = subprocess.Popen(['sh', '-c', 'while :; do :; done'], stdout=subprocess.PIPE)\nREADY\np.stdout.read()",
    "thread-computes": "import threading\ndef f():\n    while True: pass\nt = threading.Thread(target=f, daemon=True)\nt.start()\nREADY\nt.join()",
    "pool": "from concurrent.futures import ThreadPoolExecutor\ndef f(n):\n    while True: pass\nREADY\nwith ThreadPoolExecutor(2) as p: list(p.map(f, [1, 2]))",
    "processes": "from multiprocessing import Process\ndef f():\n    while True: pass\nif __name__ == '__main__':\n    p = Process(target=f)\n    p.start()\n    READY\n    p.join()",
    "loader-computes": LOADER.replace("ITEM", "[None for _ in range(10**9)]"),
    "gang-computes": GANG
    + "READY\nif rank == 1:\n    while True: rank = rank\ndist.all_reduce(value)",
}

WAITING = {  # sound programs that only wait for what is to come
    "coordinator": "import queue, threading, time\nq = queue.Queue()\ndef feed():\n    while True:\n        time.sleep(3600)\n        q.put(1)\nthreading.Thread(target=feed, daemon=True).start()\nREADY\nq.get()",
    "coordinator-of-processes": "import multiprocessing as m, time\ndef feed(q):\n    time.sleep(3600)\n    q.put(1)\nif __name__ == '__main__':\n    q = m.Queue()\n    m.Process(target=feed, args=(q,), daemon=True).start()\n    time.sleep(.5)\n    READY\n    q.get()",
    "server": "import http.server\ns = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\nREADY\ns.serve_forever()",
    "server-in-thread": "import http.server, threading\ns = http.server.ThreadingHTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\nthreading.Thread(target=s.serve_forever).start()\nREADY\nthreading.Event().wait()",
    "accepts": "import socket\ns = socket.create_server(('127.0.0.1', 0))\nREADY\ns.accept()",
    "selects": "import select, socket\ns = socket.create_server(('127.0.0.1', 0))\nREADY\nselect.select([s], [], [])",
    "asyncio-server": "import asyncio\nasync def main():\n    s = await asyncio.start_server(lambda r, w: None, '127.0.0.1', 0)\n    READY\n    await s.serve_forever()\nasyncio.run(main())",
    "polls": "import os, time\nREADY\nwhile not os.path.exists('never'):\n    time.sleep(30)",
    "polls-often": "import os, time\nREADY\nwhile not os.path.exists('never'):\n    time.sleep(.5)",
    "event-with-limit": "import threading\nREADY\nthreading.Event().wait(10**6)",
    "lock-file": "import fcntl, subprocess, sys, time\nf = open('lock', 'w')\nhold = 'import fcntl, time; f = open(\"lock\", \"a\"); fcntl.flock(f, 2); print(1, flush=True); time.sleep(3600)'\np = subprocess.Popen([sys.executable, '-c', hold], stdout=subprocess.PIPE)\np.stdout.readline()\nREADY\nfcntl.flock(f, 2)",
    "lock-file-polled": "import os, time\nopen('lock', 'w').close()\nREADY\nwhile True:\n    try:\n        os.open('lock', os.O_CREAT | os.O_EXCL)\n        break\n    except FileExistsError:\n        time.sleep(10)",
    "download": "import socket, subprocess, sys, threading\ns = socket.create_server(('127.0.0.1', 0))\nget = f'import socket; socket.create_connection((\"127.0.0.1\", {s.getsockname()[1]})).recv(1)'\nREADY\nsubprocess.run([sys.executable, '-c', get])",
    "download-in-shell": "import subprocess\nREADY\nsubprocess.run(['sh', '-c', 'sleep 3600; echo done'])",
    "pipe-of-child": "import subprocess\np = subprocess.Popen(['sleep', '3600'], stdout=subprocess.PIPE)\nREADY\np.stdout.read()",
    "database": "import socket\ns = socket.create_server(('127.0.0.1', 0))\nc = socket.create_connection(s.getsockname())\nREADY\nc.recv(1)",
    "signal": "import signal, threading\nstop = threading.Event()\nsignal.signal(signal.SIGTERM, lambda *_: stop.set())\nREADY\nstop.wait()",
    "pause": "import signal\nREADY\nsignal.pause()",
    "sigwait": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\nREADY\nsignal.sigwait({signal.SIGUSR1})",
    "timer": "import threading\ndone = threading.Event()\nthreading.Timer(3600, done.set).start()\nREADY\ndone.wait()",
    "alarm": "import signal, threading\ndone = threading.Event()\nsignal.signal(signal.SIGALRM, lambda *_: done.set())\nsignal.alarm(3600)\nREADY\ndone.wait()",
    "pool-of-sleepers": "import time\nfrom concurrent.futures import ThreadPoolExecutor\nREADY\nwith ThreadPoolExecutor(2) as p:\n    list(p.map(time.sleep, [3600, 3600]))",
    "process-pool": "import time\nfrom concurrent.futures import ProcessPoolExecutor\nif __name__ == '__main__':\n    with ProcessPoolExecutor(2) as p:\n        found = p.map(time.sleep, [3600, 3600])\n        time.sleep(.5)\n        READY\n        list(found)",
    "two-that-sleep": GANG + "READY\ntime.sleep(3600 + rank)",
}


@dataclass(frozen=True)
class Result:
    name: str
    right: bool | None  # None: not run
    text: str


def main() -> int:
    words = sys.argv[1:]
    chosen = [(n, p, True) for n, p in HANGS.items()]
    chosen += [(n, p, False) for n, p in (SOUND | WAITING).items()]
    chosen = [each for each in chosen if not words or any(word in each[0] for word in words)]
    with ThreadPoolExecutor(6) as pool:
        results = []
        for hangs, each in pool.map(lambda each: (each[2], judge(*each)), chosen):
            state = "not run" if each.right is None else "right" if each.right else "WRONG"
            print(f"{each.name:20} {state:8} {each.text}", flush=True)
            results.append((hangs, each))
    hanging = [each for hangs, each in results if hangs and each.right is not None]
    sound = [each for hangs, each in results if not hangs and each.right is not None]
    found = sum(bool(each.right) for each in hanging)
    ended = sum(not each.right for each in sound)
    print(f"found {found} of {len(hanging)} hangs with their lines; ended {ended} of {len(sound)}")
    return int(found < len(hanging) or ended > 0)


def judge(name: str, text: str, hangs: bool) -> Result:
    if "torch" in text and find_spec("torch") is None:
        return Result(name, None, "torch is not installed")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(text.replace("READY", 'print("ready", flush=True)'))
        ranks = 2 if text.startswith(GANG) else 1
        started = [start(path, rank, ranks) for rank in range(ranks)]
        try:
            for each in started:
                assert each.stdout is not None
                assert each.stdout.readline() == b"ready\n", name
            time.sleep(2)  # the line after it
            found = take_stacks(os.path.dirname(sys.executable), list_group(started), 0)
        finally:
            for each in started:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
    reason, ranks_behind, ends = decide(json.loads(json.dumps(found)))
    if not hangs:
        return Result(name, not ends, reason)
    lines = path_lines(text)
    right = any(f"program.py:{line} " in f"{reason} " for line in lines)
    right = right and ranks_behind == (ranks - 1,)
    return Result(name, right, f"{'ended' if ends else 'named'}: {reason}")


def path_lines(text: str) -> list[int]:
    return [at for at, line in enumerate(text.splitlines(), 1) if "# HERE" in line]


def start(path: Path, rank: int, ranks: int) -> "subprocess.Popen[bytes]":
    env = {**os.environ, "STORE": f"file://{path.parent}/store"}
    if ranks > 1:
        env |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, str(path)]
    return subprocess.Popen(
        command, env=env, cwd=path.parent, stdout=subprocess.PIPE, start_new_session=True
    )


def list_group(started: "list[subprocess.Popen[bytes]]") -> list[int]:
    groups = {each.pid for each in started}
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.getpgid(int(entry)) in groups:
                found.append(int(entry))
        except OSError:  # it has ended
            continue
    return found


def decide(found: dict[str, object]) -> tuple[str, tuple[int, ...], bool]:
    """Return the reason that the server would give, the ranks that it names, and whether it would
    end the work."""
    from msgspec import convert

    now = datetime.now(UTC)
    stacks = convert(found["stacks"], tuple[RankStack, ...])
    report = StackReport(
        at=now,
        stacks=stacks,
        moved=bool(found["moved"]),
        deadlocked=bool(found["deadlocked"]),
        text=str(found["text"]),
    )
    order = Order(seq=1, kind=STACKS, seconds=90, reason="", at=now)
    node = Node(
        attempt_id="j-1", project="p", rank=0, phase=NodePhase.RUNNING, order=order, stacks=report
    )
    behind = find_behind([node], "no progress", now)
    return behind.reason[:150], tuple(behind.ranks), is_hopeless([node])


if __name__ == "__main__":
    threading.stack_size(1 << 20)
    sys.exit(main())
