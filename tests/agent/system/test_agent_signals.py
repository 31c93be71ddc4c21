"""Which processes of the work get SIGTERM first: the program that handles it, while its helpers go
on serving it.
"""

import sys

import pytest
from tests.system.agent_server import make_rig
from tests.waits import PATIENCE_S

pytestmark = pytest.mark.system
# A program whose data workers have no handler, as those of a DataLoader; it needs them to save.
TRAIN = """\
import multiprocessing, os, signal, sys, time
def feed(queue):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        queue.put(1)
heard = []
if __name__ == "__main__":
    queue = multiprocessing.Queue(2)
    for _ in range(2):
        multiprocessing.Process(target=feed, args=(queue,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    print("ready", flush=True)
    while not heard:
        queue.get(timeout=60)
        time.sleep(0.01)
    for _ in range(50):
        queue.get(timeout=60)
    time.sleep(0.5)
    print("saved", len(heard), flush=True)
"""
# Starts two ranks, and kills them as soon as it gets the signal itself, as launchers do after a
# time limit.
LAUNCHER = """\
import os, signal, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, sys.argv[1]], env={**os.environ, "LOCAL_RANK": str(rank)})
    for rank in range(2)
]
signal.signal(signal.SIGTERM, lambda *_: [each.kill() for each in ranks])
print("launched", flush=True)
sys.exit(max(each.wait() for each in ranks))
"""
# Waits for its helper, even after the signal.
WAITS = """\
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: None)
helper = "import signal, sys; signal.signal(15, lambda *_: sys.exit(3)); print('ready', flush=True)"
print(subprocess.call([sys.executable, "-c", helper + "; signal.pause()"]), flush=True)
"""
FILES = "cat >train.py <<'END'\n" + TRAIN + "END\ncat >launcher.py <<'END'\n" + LAUNCHER + "END\n"
WAYS = {
    "exec": "exec python3 train.py",
    "plain": "python3 train.py; echo end",
    "in a line": "echo begin && nice python3 train.py | cat",
    "in a script": "echo 'python3 train.py; echo end' >x.sh; sh x.sh",
    "with a trap": "echo 'trap \"echo trapped\" TERM; python3 train.py; :' >x.sh; bash x.sh",
    "passed on": (
        "echo 'python3 train.py & p=$!; trap \"kill $p; wait $p\" TERM; wait $p' >x.sh; bash x.sh"
    ),
    "a trap for the end": (
        "echo 'trap \"echo over\" EXIT; python3 train.py; :' >x.sh; bash x.sh; echo end"
    ),
    "timeout": "timeout 600 python3 train.py",
    "an unknown wrapper": 'cp "$(command -v timeout)" wrap && ./wrap 600 python3 train.py',
    "nohup and env": "nohup env A=1 sh -c 'true; python3 train.py; true'",
    "from Python": 'python3 -c \'import subprocess; subprocess.call(["python3", "train.py"])\'',
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", ["notice", "stop"])
def test_a_program_saves_while_its_helpers_serve_it(how: str, kind: str) -> None:
    with make_rig(run=FILES + WAYS[how]) as rig:
        rig.launch()
        rig.until(lambda: "ready" in rig.output())
        rig.stub.give(kind, 60)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert "saved 1\n" in rig.output(), rig.output()


def test_the_ranks_of_a_launcher_get_the_signal_in_its_place() -> None:
    with make_rig(run=FILES + "python3 launcher.py train.py; echo end") as rig:
        rig.launch()
        rig.until(lambda: rig.output().count("ready") == 2)
        rig.stub.give("notice", 60)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert rig.output().count("saved 1\n") == 2, rig.output()
        assert rig.output().endswith("saved 1\n")  # a later stage does not begin


def test_a_task_may_notify_every_process() -> None:
    run = f"cat >waits.py <<'END'\n{WAITS}END\npython3 waits.py; echo end"
    with make_rig(run=run, notify="all") as rig:
        rig.launch()
        rig.until(lambda: "ready" in rig.output())
        rig.stub.give("notice", 600)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert rig.output() == "ready\n3\n"


def test_a_task_may_notify_only_what_its_commands_have_started() -> None:
    run = FILES + "python3 launcher.py train.py; echo end"
    with make_rig(run=run, notify="main") as rig:
        rig.launch()
        rig.until(lambda: rig.output().count("ready") == 2)
        rig.stub.give("notice", 600)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert "saved" not in rig.output()  # the launcher has killed its ranks


# A server that ends on SIGTERM, and a program that needs it to save.
SERVED = """\
cat >serve.py <<'END'
import os, signal, socketserver, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
socketserver.UnixStreamServer("server", socketserver.StreamRequestHandler).serve_forever()
END
cat >uses.py <<'END'
import os, signal, socket, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
while not os.path.exists("server"): time.sleep(0.01)
print("ready", flush=True)
while not heard: time.sleep(0.01)
time.sleep(1)
socket.socket(socket.AF_UNIX).connect("server")
print("saved", len(heard), flush=True)
END
python3 serve.py & python3 uses.py; echo end
"""


def test_a_server_in_the_background_may_outlast_the_program_that_needs_it() -> None:
    with make_rig(run=SERVED, notify="main") as rig:
        rig.launch()
        rig.until(lambda: "ready" in rig.output())
        rig.stub.give("notice", 600)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert rig.output() == "ready\nsaved 1\n"


def test_a_stage_that_has_saved_is_not_taken_for_complete() -> None:
    stages = "echo one; python3 train.py && touch two.done; echo three"
    with make_rig(run=f"{FILES}{stages}") as rig:
        rig.launch()
        rig.until(lambda: "ready" in rig.output())
        rig.stub.give("notice", 60)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert rig.output().splitlines()[-1] == "saved 1"
        assert not (rig.home / "work" / "two.done").exists()
        assert rig.exited()["exit_code"] == 0


# Imports for a while, and installs its handler only then.
STARTS = """\
import os, signal, sys, time
print("starts", flush=True)
while not os.path.exists("asked"):
    time.sleep(0.01)
signal.signal(signal.SIGTERM, lambda *_: (print("saved 1", flush=True), os._exit(0)))
time.sleep(600)
"""


def test_a_program_that_starts_gets_the_signal_when_it_has_a_handler() -> None:
    with make_rig(run=f"cat >starts.py <<'END'\n{STARTS}END\npython3 starts.py; echo end") as rig:
        rig.launch()
        rig.until(lambda: "starts" in rig.output())
        rig.stub.give("notice", 600)
        rig.until(lambda: (rig.home / "notice.json").exists())
        (rig.home / "work" / "asked").touch()
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert rig.output() == "starts\nsaved 1\n"
        assert rig.exited()["outcome"] == "preempted"


def test_a_stop_does_not_wait_for_a_program_that_starts() -> None:
    with make_rig(run=f"cat >starts.py <<'END'\n{STARTS}END\npython3 starts.py; echo end") as rig:
        rig.launch()
        rig.until(lambda: "starts" in rig.output())
        rig.stub.give("notice", 3600)
        rig.until(lambda: (rig.home / "notice.json").exists())
        rig.stub.give("stop", 3600)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("stopped", 143)


def test_a_program_that_never_has_a_handler_ends_before_the_time_is_up() -> None:
    run = "cat >t.py <<'END'\nimport time\nprint('starts', flush=True)\ntime.sleep(600)\nEND\n"
    with make_rig(run=f"{run}python3 t.py; echo end") as rig:
        rig.launch()
        rig.until(lambda: "starts" in rig.output())
        rig.stub.give("notice", 4)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("preempted", 143)


def test_a_program_without_a_handler_ends_at_once_with_its_helpers() -> None:
    with make_rig(run="echo ready; sleep 600 & sleep 600 | cat") as rig:
        rig.launch()
        rig.until(lambda: "ready" in rig.output())
        rig.stub.give("notice", 600)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert rig.exited()["outcome"] == "preempted"


def test_helpers_without_a_handler_end_after_the_program() -> None:
    with make_rig(run=FILES + "sleep 600 & python3 train.py; wait") as rig:
        rig.launch()
        rig.until(lambda: "ready" in rig.output())
        rig.stub.give("notice", 600)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert "saved 1\n" in rig.output(), rig.output()


def test_a_handler_that_is_installed_late_is_called_beside_one_that_is_in_use() -> None:
    late = (
        "python3 -uS -c 'import os, signal, time\n"
        'while not os.path.exists("asked"): time.sleep(0.01)\n'
        'signal.signal(15, lambda *_: (print("late"), os._exit(0)))\n'
        "time.sleep(600)' &\n"
    )
    early = FILES.replace("for _ in range(50)", "open('asked', 'w')\n    for _ in range(500)")
    early = early.replace("time.sleep(0.5)", "time.sleep(2)")
    with make_rig(run=early + late + "python3 train.py; wait") as rig:
        rig.launch()
        rig.until(lambda: "ready" in rig.output())
        rig.stub.give("notice", 600)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert {"late", "saved 1"} <= {*rig.output().splitlines()}


def test_the_workers_of_pytorch_are_no_program_that_handles_the_signal() -> None:
    """They handle SIGTERM, even those of a program that does not."""
    pytest.importorskip("torch")
    run = (
        "python3 -uc 'import torch, time\n"
        "from torch.utils.data import DataLoader\n"
        "while True:\n"
        "    for batch in DataLoader(torch.zeros(1000, 1), num_workers=2):\n"
        '        print("ready"); time.sleep(0.01)\''
    ).replace("python3", sys.executable)
    with make_rig(run=run) as rig:
        rig.launch()
        rig.until(lambda: "ready" in rig.output())
        rig.stub.give("notice", 600)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert rig.exited()["outcome"] == "preempted"
        assert "Error" not in rig.output()


def test_the_ranks_of_torchrun_save_for_longer_than_it_would_wait() -> None:
    """It ends its ranks 30 s after it has got SIGTERM itself."""
    pytest.importorskip("torch")
    ranks = """\
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
heard = []
if __name__ == "__main__":
    dist.init_process_group("gloo")
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    for batch in DataLoader(torch.zeros(10**6, 1), num_workers=1):
        mark = torch.tensor(len(heard))
        dist.all_reduce(mark)
        if mark:
            break
        print("ready" + os.environ["RANK"], flush=True)
        time.sleep(0.05)
    if dist.get_rank() == 0:
        time.sleep(33)
        print("saved", len(heard), flush=True)
    dist.barrier()
"""
    run = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 ranks.py"
    with make_rig(run=f"cat >ranks.py <<'END'\n{ranks}END\n{run}") as rig:
        rig.launch()
        rig.until(lambda: {"ready0", "ready1"} <= {*rig.output().splitlines()})
        rig.stub.give("notice", 600)
        assert rig.agents[-1].wait(PATIENCE_S + 33) == 0, rig.said()
        assert "saved 1\n" in rig.output(), rig.output()
        exited = rig.exited()
        assert (exited["outcome"], exited["exit_code"]) == ("preempted", 0)


# Programs as people write them, besides those of `WAYS`: each line is one task.
OTHERS = {
    "strict": "set -euo pipefail; python3 train.py 2>&1 | tee log; echo end",
    "nohup": "nohup python3 train.py >log 2>&1 & tail -n +1 -f log; echo end",
    "an orphan": "sh -c 'nohup python3 train.py >log 2>&1 &'; tail -n +1 -f log; echo end",
    "waited for": "python3 train.py & wait; echo end",
    "job control": "set -m; echo 'python3 train.py; echo end' >x.sh; bash x.sh; echo end",
    "a subshell": "(cd .; python3 train.py; echo end); echo end",
    "make": "printf 'all:\\n\\tpython3 train.py\\n\\techo end\\n' >Makefile; make; echo end",
    "a trap": "trap 'kill $p' TERM; python3 train.py & p=$!; wait $p || true; wait",
    "an encoder": 'cp "$(command -v timeout)" encode; python3 train.py | ./encode 600 cat; echo end',
}


@pytest.mark.parametrize("how", OTHERS)
def test_the_step_of_any_program_is_safe_and_no_other_stage_begins(how: str) -> None:
    with make_rig(run=f"{FILES}touch log; {OTHERS[how]}") as rig:
        rig.launch()
        rig.until(lambda: "ready" in rig.output())
        rig.stub.give("notice", 60)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert "saved 1\n" in rig.output(), rig.output()
        assert "end" not in rig.output().splitlines()
        assert rig.exited()["outcome"] == "preempted"


def test_a_program_that_waits_for_the_signal_has_a_handler() -> None:
    """It blocks the signal, so that the kernel names no handler."""
    code = (
        "import signal, threading, time\n"
        "stop = threading.Event()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "def wait(): signal.sigwait([signal.SIGTERM]); stop.set()\n"
        "threading.Thread(target=wait).start()\n"
        "print('ready', flush=True)\n"
        "while not stop.is_set(): time.sleep(0.05)\n"
        "print('saved 1', flush=True)\n"
    )
    with make_rig(run=f"cat >t.py <<'END'\n{code}END\npython3 t.py; echo end") as rig:
        rig.launch()
        rig.until(lambda: "ready" in rig.output())
        rig.stub.give("notice", 3600)  # half of which a program that starts would have
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert rig.output() == "ready\nsaved 1\n"


@pytest.mark.parametrize("notify", ["handlers", "main"])
def test_complete_work_goes_on_with_its_next_stage(notify: str) -> None:
    complete = FILES.replace("    time.sleep(0.5)\n", COMPLETE)
    with make_rig(run=f"{complete}python3 train.py; echo end", notify=notify) as rig:
        rig.launch()
        rig.until(lambda: "ready" in rig.output())
        rig.stub.give("notice", 60)
        assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
        assert rig.output().splitlines()[-1] == "end"
        assert rig.exited()["exit_code"] == 0


# Ends with much output, so that the agent still reads it when the program has ended.
COMPLETE = """\
    print('CAVVY_PROGRESS {"complete": true}')
    print("x" * 100000)
"""
