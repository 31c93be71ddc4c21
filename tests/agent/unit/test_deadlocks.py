"""Which waits nothing can end."""

import pytest
from tests.agent.unit.test_stuck import program
from tests.waits import wait_until

from cavvy.agent.work.deadlocks import is_deadlocked


@pytest.mark.parametrize(
    ("program_text", "dead"),
    [
        ("import threading\nlock = threading.Lock()\nlock.acquire()\nREADY\nlock.acquire()", True),
        ("import queue\nREADY\nqueue.Queue().get()", True),
        (
            "import threading\nt = threading.Thread(target=threading.Event().wait, daemon=True)\n"
            "t.start()\nREADY\nt.join()",
            True,
        ),
        ("import threading\nREADY\nthreading.Event().wait(10**6)", False),
        ("import time\nREADY\ntime.sleep(10**6)", False),
        ("import socket\ns = socket.create_server(('127.0.0.1', 0))\nREADY\ns.accept()", False),
        (
            "import queue, threading, time\nq = queue.Queue()\n"
            "threading.Thread(target=lambda: q.put(time.sleep(10**6)), daemon=True).start()\n"
            "READY\nq.get()",
            False,
        ),
        (
            "import signal, threading\nstop = threading.Event()\n"
            "signal.signal(signal.SIGTERM, lambda *_: stop.set())\nREADY\nstop.wait()",
            False,
        ),
        ("import subprocess\nREADY\nsubprocess.run(['sleep', '1000000'])", False),
        ("READY\nwhile True: pass", False),
    ],
    ids=["lock", "queue", "join", "limit", "sleep", "server", "fed", "signal", "child", "computes"],
)
def test_a_deadlock_is_read_from_the_calls_of_all_threads(program_text: str, dead: bool) -> None:
    text = program_text.replace("READY", "print('ready', flush=True)")
    with program(text, ready="R" if text.endswith("pass") else "S") as pid:
        family = [pid, *list_below(pid)]
        if dead:
            wait_until(lambda: is_deadlocked([pid]))
        else:
            assert not any(is_deadlocked([pid, *list_below(pid)]) for _ in range(20))
        assert is_deadlocked([]) is False
        assert is_deadlocked([*family, 1 << 30]) is dead, "a process that has ended says nothing"


def list_below(pid: int) -> list[int]:
    """Return the children of a process."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]
