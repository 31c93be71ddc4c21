"""What an agent does with work: runs it as promised, reports it, and leaves nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from tests.agent.unit.test_event_files import scalar
from tests.system.agent_server import GANG, make_rig
from tests.waits import PATIENCE_S

from cavvy.agent.bundle import make_archive
from cavvy.agent.work.environment import MPI_FOLDERS

pytestmark = pytest.mark.system


def test_exit_code_log_and_order_of_messages() -> None:
    with make_rig(run="echo one; echo two >&2; echo three; exit 7") as rig:
        assert rig.finish() == 0
        assert rig.output() == "one\ntwo\nthree\n"
        assert rig.stub.kinds() == ["running", "exited"]
        exited = rig.exited()
        assert (exited["outcome"], exited["exit_code"], exited["log_bytes"]) == ("exit", 7, 14)
        assert json.loads((rig.home / "exit.json").read_text())["exit_code"] == 7
        assert rig.said() == ""


def test_success_signal_and_tempfail() -> None:
    for run, outcome, code in [
        ("true", "succeeded", 0),
        ("kill -KILL $$", "exit", 137),
        ("exit 75", "preempted", 75),
        ("false; echo never", "exit", 1),
        ("no-such-program-anywhere", "exit", 127),
    ]:
        with make_rig(run=run) as rig:
            assert rig.finish() == 0
            assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == (outcome, code), run
            assert "never" not in rig.output()


def test_environment_is_clean_and_as_promised() -> None:
    work = {
        "run": "env -0",
        "env": {"A": "b c", "CAVVY_RANK": "user", "PYTHONUNBUFFERED": "0"},
        "secrets": {"TOKEN": "hunter2hunter2"},
        "params": {"lr": 0.1, "use-amp": True, "name": "x"},
        "nodes": 2,
        "addresses": ["10.0.0.1", "10.0.0.2"],
        "master_port": 20123,
        "accelerators_per_node": 2,
        "checkpoint": {"path": "ckpt", "storage": None, "every_s": 60.0},
    }
    with make_rig(**work) as rig:
        rig.config.update(
            rank=1, devices=["GPU-a", "GPU-b"], device_indices=[1, 3], vendor="nvidia"
        )
        assert rig.finish() == 0
        env = dict(line.split("=", 1) for line in rig.output().split("\0") if line)
        env = {
            name: value
            for name, value in env.items()
            if name not in ("PWD", "SHLVL", "_", "OLDPWD", "LC_CTYPE")
        }
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", env.pop("MLFLOW_TRACKING_URI"))
        assert re.fullmatch("[0-9a-f]{48}", env.pop("MLFLOW_TRACKING_TOKEN"))
        assert env == {
            **{
                "PATH": os.environ["PATH"],
                "HOME": str(rig.folder),
                "LANG": "C.UTF-8",
                "TERM": "dumb",
                "TMUX_TMPDIR": str(rig.home),
            },
            **dict.fromkeys(MPI_FOLDERS, env["PRTE_MCA_prte_tmpdir_base"]),
            **{"A": "b c", "PYTHONUNBUFFERED": "0", "TOKEN": "***"},
            **{"CAVVY_PARAM_LR": "0.1", "CAVVY_PARAM_USE_AMP": "true", "CAVVY_PARAM_NAME": "x"},
            **{
                "CAVVY_JOB": "digits",
                "CAVVY_JOB_ID": str(rig.stub.work["job_id"]),
                "CAVVY_PROJECT": "default",
            },
            **{"CAVVY_ATTEMPT": "1", "CAVVY_GANG": GANG, "CAVVY_RANK": "1"},
            "CAVVY_CHECKPOINT_DIR": f"{rig.home}/work/ckpt",
            "CAVVY_CHECKPOINT_EVERY_S": "60.0",
            "CAVVY_NOTICE_FILE": f"{rig.home}/notice.json",
            "CAVVY_ADVICE_FILE": f"{rig.home}/advice.json",
            "CAVVY_PROGRESS_FILE": f"{rig.home}/progress.json",
            **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "20123", "NODE_RANK": "1", "NNODES": "2"},
            **{"NPROC_PER_NODE": "2", "CAVVY_HOSTS": "10.0.0.1,10.0.0.2"},
            **{"CAVVY_HOSTFILE": f"{rig.home}/hosts", "CAVVY_MPI_KEY": ""},
            "CAVVY_MPI": f"{sys.executable} {rig.home}/mpi.py",
            "CAVVY_CHECKPOINT_EVERY_FILE": f"{rig.home}/every",
            "CAVVY_NOTICE": f"{rig.home}/notice.sock",
            **{"CUDA_VISIBLE_DEVICES": "1,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        }


AGAIN = """python3 -S - <<'END'
import os, socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect(os.environ["CAVVY_NOTICE"])
    line.sendall(b'{"again": {}}\\n')
sys.exit(1)
END"""


def test_work_that_asks_to_be_run_again_needs_no_exit_code_of_its_launcher() -> None:
    with make_rig(run=f"({AGAIN}\n) || {{ sleep 0.2; exit 1; }}") as rig:
        assert rig.finish() == 0
        exited = rig.exited()
        assert (exited["outcome"], exited["exit_code"]) == ("preempted", 75)


def test_work_sees_no_descriptor_of_the_agent_and_default_signals() -> None:
    run = (
        "ls /proc/self/fd | wc -l; grep -E 'SigIgn|SigBlk' /proc/self/status; readlink "
        "/proc/self/fd/0"
    )
    with make_rig(run=run) as rig:
        assert rig.finish() == 0
        descriptors, _, blocked, _, ignored, stdin = rig.output().split()
        assert (descriptors, blocked, stdin) == ("4", "0" * 16, "/dev/null")
        # 32 and 33 are the C library's own: make starts programs with them ignored, and nobody can
        # reset them.
        assert int(ignored, 16) & ~(3 << 31) == 0


def test_secrets_are_on_no_command_line_and_in_no_message() -> None:
    secret = "correct-horse-battery"
    run = """cat /proc/$$/cmdline; echo
    printf '%s' "${TOKEN%-battery}"; sleep 0.3; echo -battery
    printf 'CAVVY_PROGRESS {"step": 1, "note": "%s"}\\n' $TOKEN"""
    with make_rig(run=run, secrets={"TOKEN": secret}) as rig:
        assert rig.finish() == 0
        assert secret not in rig.output()
        assert "***\n" in rig.output()
        assert rig.stub.last("progress")["values"] == {"step": 1, "note": "***"}
        assert secret not in json.dumps(rig.stub.messages)
        kept = [
            path
            for path in rig.folder.rglob("*")
            if path.is_file() and secret in path.read_text(errors="ignore")
        ]
        assert [path.name for path in kept] == []


def test_claim_waits_for_the_whole_gang() -> None:
    with make_rig(run="true") as rig:
        rig.stub.claims_before_go = 3
        assert rig.finish() == 0
        assert rig.stub.requests.count("/agent/v1/claim") == 4


@pytest.mark.parametrize("status", [401, 409, 410, 426])
def test_refused_agents_do_nothing(status: int) -> None:
    with make_rig(run="touch ran") as rig:
        rig.stub.refuse = status
        assert rig.finish() == 0
        assert not (rig.home / "work").exists()
        assert rig.stub.messages == []


def test_second_agent_of_the_rank_leaves_at_once(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with make_rig(run=f"echo once; until test -e {end}; do sleep 0.1; done") as rig:
        first = rig.launch()
        rig.until(lambda: "running" in rig.stub.kinds())
        assert rig.finish() == 0
        assert first.poll() is None
        end.touch()
        first.wait()
        assert rig.output() == "once\n"


def test_wrong_configuration_is_named() -> None:
    with make_rig() as rig:
        rig.config["rank"] = "zero"
        assert rig.finish() == 2
        assert (
            rig.said() == "cavvy-agent: configuration: `rank` must be a whole number, not 'zero'\n"
        )


def test_background_processes_are_gone_with_the_work() -> None:
    daemon = (
        "import os,time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  "
        "os.setsid(); time.sleep(300)\n"
    )
    with make_rig(
        run=f"sleep 300 & (setsid sleep 300 &) ; {sys.executable} -c '{daemon}'; echo done"
    ) as rig:
        assert rig.finish() == 0
        assert rig.output() == "done\n"
        assert rig.survivors() == []


def test_progress_by_line_and_by_file() -> None:
    run = """echo 'CAVVY_PROGRESS {"loss": 0.5, "step": 1}'; sleep 0.8
    echo '{"loss": 0.25, "step": 2}' >$CAVVY_PROGRESS_FILE"""
    with make_rig(run=run) as rig:
        assert rig.finish() == 0
        values = [
            message["values"] for message in rig.stub.messages if message["kind"] == "progress"
        ]
        assert values[-1] == {"loss": 0.25, "step": 2}
        assert rig.stub.kinds()[-1] == "exited"


def test_checkpoint_folder_outlives_the_attempt_and_is_reported() -> None:
    with make_rig(run="cat ckpt/old; echo new >ckpt/new; mkdir ckpt/d; echo more >ckpt/d/x") as rig:
        storage = rig.folder / "storage"
        storage.mkdir()
        (storage / "old").write_text("from before\n")
        rig.stub.work["checkpoint"] = {"path": "ckpt", "storage": str(storage), "every_s": None}
        assert rig.finish() == 0
        assert rig.output() == "from before\n"
        assert (storage / "d" / "x").read_text() == "more\n"
        last = rig.stub.last("checkpoint")
        assert (last["files"], last["bytes"]) == (3, 12 + 4 + 5)
        assert rig.stub.kinds()[-1] == "exited"


def test_telemetry_while_it_runs_and_idle_limit() -> None:
    with make_rig(run="sleep 60", idle_s=1.5) as rig:
        assert rig.finish() == 0
        exited = rig.exited()
        assert (exited["outcome"], exited["exit_code"]) == ("limit", 143)
        assert exited["reason"] == "no output, no CPU use and no connection in use for 1.5 s"
        assert rig.stub.last("event")["name"] == "idle", "a warning precedes the end"
        values = rig.stub.last("telemetry")["values"]  # type: ignore[call-overload]
        now = {"cpu_percent", "memory_mib", "memory_peak_mib"}
        # Disks are stated by some kernels, and since when nothing moved once that is so.
        some = {"disk_read_mib_s", "disk_write_mib_s", "still_s"}
        assert set(values) - some == now | {"cpu_mean_percent", "measured_s"}


def test_busy_work_is_not_idle() -> None:
    with make_rig(run="timeout 3 sh -c 'while :; do :; done' || true", idle_s=1) as rig:
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "succeeded"


def test_memory_limit_is_kept_and_told() -> None:
    hog = "b = bytearray(300 << 20); import time; time.sleep(30)"
    with make_rig(run=f"{sys.executable} -c '{hog}'") as rig:
        rig.config["memory_mib"] = 100
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "exit"
        assert rig.exited()["exit_code"] == 137
        assert "out of memory: the work used more than its limit of 100 MiB" in str(
            rig.exited()["reason"]
        )
        rig.until(lambda: not list(Path("/sys/fs/cgroup").glob(f"**/cavvy-{GANG}-0")))


def test_commands_beside_the_work() -> None:
    with make_rig(
        run="echo here >file; sleep 30", env={"A": "b"}, secrets={"S": "swordfish"}
    ) as rig:
        agent = rig.launch()
        rig.until(lambda: "running" in rig.stub.kinds())
        rig.until((rig.home / "work" / "file").exists)
        rig.stub.run_beside("e1", ["sh", "-c", "cat file; echo $A $S $CAVVY_RANK; exit 5"])
        rig.until(lambda: "e1" in rig.stub.exec_codes)
        assert (rig.stub.exec_output["e1"], rig.stub.exec_codes["e1"]) == (b"here\nb *** 0\n", 5)
        rig.stub.run_beside("e2", ["no-such-program"])
        rig.until(lambda: "e2" in rig.stub.exec_codes)
        assert rig.stub.exec_codes["e2"] == 127
        assert (
            rig.stub.exec_output["e2"]
            == b"cavvy: cannot start no-such-program: no such command or folder\n"
        )
        rig.stub.run_beside("e4", ["/tmp"])
        rig.until(lambda: "e4" in rig.stub.exec_codes)
        assert rig.stub.exec_codes["e4"] == 126
        assert rig.stub.exec_output["e4"] == b"cavvy: cannot start /tmp: Permission denied\n"
        rig.stub.run_beside("e3", ["sleep", "100"])
        rig.until(lambda: "e3" in rig.stub.exec_output)
        rig.stub.give("stop", 5)
        assert agent.wait(PATIENCE_S) == 0
        assert rig.stub.exec_codes["e3"] == 137
        assert rig.exited()["outcome"] == "stopped"


def test_commands_end_when_their_users_disconnect() -> None:
    lines = {
        "quiet": "sleep 1000; true",
        "loud": "trap '' HUP; while :; do echo x; sleep 0.1; done",
        "kept": "trap '' HUP; echo kept; while [ ! -e go ]; do sleep 0.1; done; exit 3",
        "read": "while [ ! -e go ]; do sleep 0.1; done; exit 4",
    }
    with make_rig(run="sleep 1000") as rig:
        agent = rig.launch()
        rig.until(lambda: "running" in rig.stub.kinds())
        for name, line in lines.items():
            rig.stub.run_beside(name, ["sh", "-c", line])
        rig.until(lambda: set(rig.stub.exec_output) == set(lines))
        rig.until(lambda: rig.stub.exec_output["kept"] == b"kept\n")
        rig.stub.execs_left = {"quiet", "loud", "kept"}
        rig.until(lambda: set(rig.stub.exec_codes) == {"quiet", "loud"})
        assert rig.stub.exec_codes == {"quiet": 128 + signal.SIGHUP, "loud": 128 + signal.SIGPIPE}
        (rig.home / "work" / "go").touch()
        rig.until(lambda: set(rig.stub.exec_codes) == set(lines))
        assert (rig.stub.exec_codes["kept"], rig.stub.exec_codes["read"]) == (3, 4)
        rig.stub.give("stop", 5)
        assert agent.wait(PATIENCE_S) == 0


def test_outputs_and_inputs_are_copied() -> None:
    with make_rig(run="cat data/in >results") as rig:
        (rig.folder / "data").mkdir()
        (rig.folder / "data" / "in").write_text("42")
        rig.stub.work["inputs"] = [{"source": f"{rig.folder}/data", "target": "data"}]
        rig.stub.work["outputs"] = [{"source": "results", "target": f"{rig.folder}/out/r"}]
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "succeeded"
        assert (rig.folder / "out" / "r").read_text() == "42"


def test_archive_runs_anywhere_and_its_bytes_are_the_same_each_time(tmp_path: Path) -> None:
    archive = make_archive()
    assert archive == make_archive()
    with make_rig(run="echo from the archive") as rig:
        path = rig.folder / "agent.pyz"
        path.write_bytes(archive)
        assert "bundle.py" not in zipfile.ZipFile(path).namelist()
        rig.command = [sys.executable, "-I", "-S", str(path)]
        assert rig.finish() == 0
        assert rig.output() == "from the archive\n"


def test_sigterm_to_the_agent_stops_the_work_in_its_grace() -> None:
    with make_rig(run="trap 'echo saved; exit 3' TERM; while :; do sleep 0.1; done") as rig:
        agent = rig.launch()
        rig.until(lambda: "running" in rig.stub.kinds())
        rig.until(rig.survivors)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(PATIENCE_S) == 0
        assert "saved" in rig.output()
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("stopped", 3)


def test_work_that_fails_on_a_broken_gpu_is_not_at_fault() -> None:
    said = "echo 'CUDA error: uncorrectable ECC error encountered'"
    with make_rig(run=f"{said}; exit 1") as rig:
        assert rig.finish() == 0
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("node", 1)
        assert rig.exited()["failure"] == "gpu-fault"
        assert rig.exited()["reason"] == "GPU fault: uncorrectable ECC error (exit code 1)"
    with make_rig(run=f"{said}; exit 0") as rig:
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "succeeded"


def test_old_pythons_run_the_agent() -> None:
    old = [
        path for path in Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8") if path.exists()
    ]
    if not old:
        pytest.skip("no Python 3.8 on this machine")
    with make_rig(run="echo old") as rig:
        rig.command = [str(old[0]), *rig.command[1:]]
        assert rig.finish() == 0
        assert rig.output() == "old\n"
        assert subprocess.run(
            [str(old[0]), "--version"], capture_output=True, text=True, check=True
        ).stdout


def test_event_files_are_read_where_checkpoints_are_stored_and_through_no_other_link(
    tmp_path: Path,
) -> None:
    stored, others = tmp_path / "stored", tmp_path / "others"
    for folder, tag in ((stored, "mine"), (others, "theirs")):
        folder.mkdir()
        (folder / "fresh").write_bytes(scalar(tag, 0.5, 3, at=time.time() + 1))
    for target in ("", str(others)):
        run = f"touch {stored}/fresh {others}/fresh; "
        run += f"cp {others}/fresh {others}/tfevents.1; cp {stored}/fresh ckpt/tfevents.1; "
        run += f"rm ckpt; ln -s {target} ckpt" if target else "ls -l ckpt"
        checkpoint = {"path": "ckpt", "storage": str(stored), "every_s": 60.0}
        with make_rig(run=run, checkpoint=checkpoint) as rig:
            assert rig.finish() == 0
            told = [each for each in rig.stub.messages if each["kind"] == "points"]
            names = [each["names"] for message in told for each in message["series"]]
            assert names == ([] if target else [["mine"]])
