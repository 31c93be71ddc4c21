"""What agents do when something goes wrong: the work, the control plane, the agent itself."""

import json
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.system.agent_server import Rig, make_rig
from tests.system.storages import GoogleStandIn, start_google
from tests.waits import PATIENCE_S

from cavvy.domain.values import asdict
from cavvy.store.objects.base import ObjectBucket
from cavvy.store.objects.locations import open_place

pytestmark = pytest.mark.system

FOREVER = "while :; do sleep 0.1; done"
# Leaves the session, the process group and its parent, and clears what could tell where it came
# from.
ESCAPE = f"""{sys.executable} -c '
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.execve("/bin/sleep", ["cavvy-test-sleep", "300"], {{"CAVVY_JOB_ID": os.environ["CAVVY_JOB_ID"]}})
    os._exit(0)
os.wait()
'"""


def test_stop_kills_what_ignores_it_when_its_time_is_up() -> None:
    with make_rig(run=f"trap '' TERM; {ESCAPE}; echo up; {FOREVER}") as rig:
        agent = rig.launch()
        rig.until(lambda: rig.output() == "up\n")
        rig.stub.give("stop", 0.5, "enough")
        assert agent.wait(PATIENCE_S) == 0
        exited = rig.exited()
        assert (exited["outcome"], exited["exit_code"], exited["reason"]) == (
            "stopped",
            137,
            "enough",
        )
        assert rig.survivors() == []


def test_stop_lets_the_commands_in_a_script_end_well() -> None:
    program = (
        "import signal,time,sys\nsignal.signal(15, lambda *a: (print('saved'), sys.exit(4)))\n"
    )
    program += "print('up')\ntime.sleep(60)"
    with make_rig(run=f'python3 -c "{program}"\necho not reached') as rig:
        agent = rig.launch()
        rig.until(lambda: rig.output() == "up\n")
        rig.stub.give("stop", 20)
        assert agent.wait(PATIENCE_S) == 0
        assert rig.output() == "up\nsaved\n"
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("stopped", 4)


def test_notice_is_written_for_the_task_and_ends_as_preempted() -> None:
    run = """trap 'cat "$CAVVY_NOTICE_FILE"; exit 75' TERM; echo up; while :; do sleep 0.1; done"""
    with make_rig(run=run) as rig:
        agent = rig.launch()
        rig.until(lambda: rig.output() == "up\n")
        rig.stub.give("notice", 20, "spot")
        assert agent.wait(PATIENCE_S) == 0
        notice = json.loads(rig.output().splitlines()[-1])
        assert (notice["seconds"], notice["reason"]) == (20, "spot")
        assert rig.exited()["outcome"] == "preempted"


def test_work_that_ends_with_0_on_a_stop_tells_both() -> None:
    with make_rig(run="trap 'exit 0' TERM; echo up; while :; do sleep 0.1; done") as rig:
        agent = rig.launch()
        rig.until(lambda: rig.output() == "up\n")
        rig.stub.give("stop", 20)
        assert agent.wait(PATIENCE_S) == 0
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("stopped", 0)


def test_an_end_before_the_signal_stands() -> None:
    """The stop comes when the work is over, while its output is copied or soon after."""
    with make_rig(run="mkfifo out; echo over") as rig:
        rig.stub.work["outputs"] = [{"source": "out", "target": str(rig.folder / "copy")}]
        agent = rig.launch()
        rig.until(lambda: rig.output().startswith("over\n"))
        rig.until(lambda: (rig.home / "status").exists())
        rig.stub.give("stop", 5)
        assert agent.wait(PATIENCE_S) == 0
        assert (rig.home / "status").read_text() == "0 0\n"


def test_stop_during_the_setup() -> None:
    with make_rig(run="echo never", setup="echo setting up; sleep 600", setup_key="k") as rig:
        agent = rig.launch()
        rig.until(lambda: rig.output() == "setting up\n")
        rig.stub.give("stop", 5)
        assert agent.wait(PATIENCE_S) == 0
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("stopped", None)
        assert rig.stub.kinds() == ["setup", "exited"]


def test_work_goes_on_without_a_control_plane_and_all_is_told_later() -> None:
    with make_rig(run="for i in 1 2 3 4 5 6; do echo $i; sleep 0.25; done; exit 9") as rig:
        agent = rig.launch()
        rig.until(lambda: rig.output().startswith("1\n"))
        rig.stub.stop()
        rig.until((rig.home / "exit.json").exists)
        assert agent.poll() is None
        rig.stub.start()
        assert agent.wait(PATIENCE_S) == 0
        assert rig.output() == "1\n2\n3\n4\n5\n6\n"
        assert rig.exited()["exit_code"] == 9


def test_a_control_plane_that_hangs_delays_nothing() -> None:
    with make_rig(run="echo up; sleep 0.5; yes | head -c 3000000; echo over") as rig:
        agent = rig.launch()
        rig.until(lambda: "running" in rig.stub.kinds())
        rig.stub.stop()
        os.unlink(rig.stub.path)
        hung = socket.socket(socket.AF_UNIX)
        hung.bind(rig.stub.path)
        hung.listen(100)  # connections are made, and nobody answers
        rig.until((rig.home / "exit.json").exists)
        hung.close()
        rig.stub.start()
        assert agent.wait(PATIENCE_S) == 0
        assert rig.output().endswith("over\n")
        assert rig.stub.log_size == 3000000 + len("up\nover\n")


def test_a_huge_log_fills_neither_disk_nor_memory_nor_holds_the_work_up() -> None:
    limit, size = 8 << 20, 300 << 20
    writer = f"""{sys.executable} -c '
import os
print("the beginning", flush=True)
line = b"x" * 1023 + b"\\n"
for i in range({size} // 65536): os.write(1, line * 64)
print("the end", flush=True)
'; touch $CAVVY_NOTICE_FILE.done"""
    with make_rig(run=writer, log_limit_mib=8) as rig:
        rig.stub.log_delay_s = 0.2
        agent = rig.launch()
        largest = memory = 0
        while not (rig.home / "notice.json.done").exists():
            assert agent.poll() is None
            largest = max(largest, folder_size(rig.home / "log"))
            memory = max(memory, resident_mib(agent.pid))
            time.sleep(0.01)
        assert len(rig.stub.log) < size / 2  # the work did not wait for the server
        assert agent.wait(PATIENCE_S) == 0
        assert 0 < largest <= limit * 1.1
        assert memory < 60
        assert rig.stub.log_size == size + len("the beginning\nthe end\n")
        assert rig.stub.lost
        assert rig.output().startswith("the beginning\nxxx")
        assert rig.output().endswith("xxx\nthe end\n")
        assert len(rig.stub.log) + sum(lost for _, lost in rig.stub.lost) == rig.stub.log_size


def test_lease_that_runs_out_ends_the_work() -> None:
    with make_rig(
        run="trap 'echo saved; exit 1' TERM; echo up; while :; do sleep 0.1; done"
    ) as rig:
        rig.stub.lease_s = rig.config["lease_s"] = 1.5  # type: ignore[assignment]
        agent = rig.launch()
        rig.until(lambda: rig.output() == "up\n")
        rig.stub.stop()
        assert agent.wait(PATIENCE_S) == 0
        assert rig.survivors() == []
        left = json.loads((rig.home / "exit.json").read_text())
        assert left["outcome"] == "preempted"
        assert "lease" in left["reason"]
        assert (rig.home / "undelivered").exists()
        rig.stub.start()
        assert rig.finish("--deliver") == 0
        assert not (rig.home / "undelivered").exists()
        assert rig.output().endswith("saved\n")
        assert rig.exited()["outcome"] == "preempted"


def test_work_that_ended_does_not_wait_for_a_server_that_is_away() -> None:
    with make_rig(run="echo up; while [ ! -e go ]; do sleep 0.05; done; exit 3") as rig:
        rig.config["leaves_after_s"] = 0.5
        agent = rig.launch()
        rig.until(lambda: rig.output() == "up\n")
        rig.stub.stop()
        (rig.home / "work" / "go").touch()
        assert agent.wait(PATIENCE_S) == 0
        assert (rig.home / "undelivered").exists()
        rig.stub.start()
        assert rig.finish("--deliver") == 0
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("exit", 3)


def sign_uploads() -> list[dict[str, object]]:
    bucket = open_place("gs://data/x", start_google(), lambda: datetime.now(UTC)).place
    assert isinstance(bucket, ObjectBucket)
    return [asdict(bucket.sign_put(f"left/{each}", 600)) for each in range(4)]


@pytest.mark.parametrize(("code", "outcome"), [(0, "succeeded"), (3, "exit")])
def test_results_of_work_that_ended_go_to_the_bucket_while_the_server_is_away(
    code: int, outcome: str
) -> None:
    outputs = [{"source": "out", "target": "gs://data/out/"}]
    run = f"echo up; while [ ! -e go ]; do sleep 0.05; done; mkdir out; echo r >out/a; exit {code}"
    with make_rig(run=run, outputs=outputs, deposit_after_s=0.5) as rig:
        rig.stub.uploads = sign_uploads()
        agent = rig.launch()
        rig.until(lambda: rig.output() == "up\n" and "/agent/v1/data/deposit" in rig.stub.answered)
        rig.stub.stop()
        (rig.home / "work" / "go").touch()
        assert agent.wait(PATIENCE_S) == 0
        assert not (rig.home / "undelivered").exists()
        manifest = json.loads(GoogleStandIn.objects["data/left/0"])
        exited = manifest["messages"][-1]
        assert (exited["kind"], exited["outcome"], exited["exit_code"]) == ("exited", outcome, code)
        sent = [each["name"] for each in manifest["pieces"] if each["kind"] == "output"]
        assert sent == ([] if code else ["a"])  # the outputs of failed work are not wanted
        assert code or GoogleStandIn.objects["data/left/1"].endswith(b"r\n")


@pytest.mark.parametrize("uploads", [0, 3])
def test_results_that_no_bucket_takes_wait_for_the_server(uploads: int) -> None:
    run = "echo up; while [ ! -e go ]; do sleep 0.05; done"
    with make_rig(run=run, deposit_after_s=0.5) as rig:
        nowhere: dict[str, object] = {"method": "PUT", "url": "http://127.0.0.1:1/x", "headers": {}}
        rig.stub.uploads = [nowhere] * uploads
        agent = rig.launch()
        rig.until(lambda: rig.output() == "up\n" and "/agent/v1/data/deposit" in rig.stub.answered)
        rig.stub.stop()
        (rig.home / "work" / "go").touch()
        rig.until((rig.home / "exit.json").exists)
        rig.until(lambda: not uploads or "storing the results" in rig.said())
        rig.stub.start()
        assert agent.wait(PATIENCE_S) == 0
        assert rig.exited()["outcome"] == "succeeded"


def test_every_answer_renews_the_lease() -> None:
    with make_rig(run="sleep 11; echo done") as rig:
        rig.stub.lease_s = rig.config["lease_s"] = 5.0
        assert rig.finish() == 0
        assert (rig.exited()["outcome"], rig.output()) == ("succeeded", "done\n")


def test_a_lost_claim_ends_the_work_at_once() -> None:
    with make_rig(run=f"trap '' TERM; {ESCAPE}; echo up; {FOREVER}") as rig:
        agent = rig.launch()
        rig.until(lambda: rig.output() == "up\n")
        rig.stub.refuse = 410
        rig.stub.give("notice", 3600)
        assert agent.wait(PATIENCE_S) == 0
        assert rig.survivors() == []


def test_killed_reaper_takes_the_work_along_and_is_told() -> None:
    with make_rig(run=f"{ESCAPE}; sleep 300 & echo up; {FOREVER}") as rig:
        agent = rig.launch()
        rig.until(lambda: rig.output() == "up\n")
        reaper = int(Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()[0])
        os.kill(reaper, signal.SIGKILL)
        assert agent.wait(PATIENCE_S) == 0
        assert rig.survivors() == []
        assert rig.exited()["outcome"] == "node"


def test_killed_agent_never_begins_again_and_its_last_words_are_delivered() -> None:
    with make_rig(run="echo $$ >>runs; echo up; sleep 300") as rig:
        agent = rig.launch()
        rig.until(lambda: rig.output() == "up\n")
        agent.kill()
        agent.wait()
        assert rig.finish() == 0  # started again in the same home
        assert rig.survivors() == []
        assert len((rig.home / "work" / "runs").read_text().split()) == 1
        assert (rig.exited()["outcome"], rig.exited()["log_bytes"]) == ("node", 3)


def test_agent_killed_while_it_delivers_loses_nothing() -> None:
    with make_rig(run="echo all; exit 6") as rig:
        agent = rig.launch()
        rig.until(lambda: "running" in rig.stub.kinds())
        rig.stub.stop()
        rig.until((rig.home / "exit.json").exists)
        agent.kill()
        agent.wait()
        before = rig.said()
        early = rig.launch("--deliver")
        rig.until(lambda: "trying again" in rig.said()[len(before) :])
        early.terminate()
        assert early.wait(PATIENCE_S) == os.EX_TEMPFAIL  # nobody was there
        assert (rig.home / "undelivered").exists()
        rig.stub.start()
        assert rig.finish("--deliver") == 0
        assert rig.output() == "all\n"
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("exit", 6)
        told = len(rig.stub.messages)
        assert rig.finish("--deliver") == 0
        assert len(rig.stub.messages) == told


@pytest.mark.parametrize("seed", range(12))
def test_kill_at_any_moment_leaves_no_process(seed: int) -> None:
    """At a random instant of its life, from its start to beyond its end."""
    moment = random.Random(seed).uniform(0, 0.25)
    run = f"sleep 300 & (setsid sleep 300 &); {ESCAPE}; echo up; sleep 0.05; exit 3"
    with make_rig(run=run, setup="sleep 0.02", setup_key="k") as rig:
        agent = rig.launch()
        time.sleep(moment)
        agent.kill()
        agent.wait()
        rig.until(lambda: not rig.survivors())
        assert rig.finish() == 0
        assert rig.survivors() == []
        assert rig.exited()["outcome"] in ("exit", "node")
        check_run_count(rig)


def check_run_count(rig: Rig) -> None:
    assert rig.stub.kinds().count("running") <= 1
    assert rig.output().count("up\n") <= 1


def folder_size(folder: Path) -> int:
    size = 0
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def resident_mib(pid: int) -> float:
    return (
        int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        / (1 << 20)
    )


HOSTILE = """python3 -uS - <<'END'
import os, socket, time
os.mkfifo(os.environ["CAVVY_PROGRESS_FILE"])
for line in (b"[" * 60_000, b"1" * 60_000, b"{}", b"[]", b"\\xff", b'{"saved": 5}'):
    with socket.socket(socket.AF_UNIX) as task:
        task.connect(os.environ["CAVVY_NOTICE"])
        task.sendall(line + b"\\n")
for seconds in ("1e15", "-1", "NaN", "Infinity", "1e999", "1" * 400):
    with socket.socket(socket.AF_UNIX) as task:
        task.connect(os.environ["CAVVY_NOTICE"])
        task.sendall(b'{"saved": {"seconds": %s}}\\n' % seconds.encode())
with open("ckpt/state", "w") as file:
    file.write("state")
os.utime("ckpt/state", (1e11, 1e11))
print('CAVVY_PROGRESS {"half": "\\\\ud800", "done": 1}')
time.sleep(2)
END"""


def test_nonsense_that_the_task_says_goes_no_further(tmp_path: Path) -> None:
    storage = {"path": "ckpt", "storage": str(tmp_path / "storage")}
    with make_rig(run=HOSTILE, checkpoint=storage) as rig:
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "succeeded", rig.output()
        found = rig.stub.last("checkpoint")
        assert float(str(found.get("cost_s", 0))) < 60
        datetime.fromisoformat(str(found["newest_at"]))
        assert rig.stub.last("progress")["values"] == {"half": "?", "done": 1}
