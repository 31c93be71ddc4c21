"""What a user can do to a job, through the real command: detach, come back, exec, retry, rerun,
diff, drill, down.
"""

import os
import signal
from pathlib import Path

import pytest
from tests.system.trust import User, check_bill, check_clean, kill, wait_until
from tests.waits import PATIENCE_S

pytestmark = pytest.mark.system


def until(user: User, name: str) -> str:
    """Shell that waits for a file of the test."""
    return f"while [ ! -e {user.root}/{name} ]; do sleep 0.05; done"


def test_ctrl_c_detaches_and_says_how_to_come_back(user: User) -> None:
    command = user.start(
        "run", user.task(f"{{name: on, run: 'echo one; {until(user, 'go')}; echo two; exit 9'}}")
    )
    assert command.stdout is not None
    assert command.stdout.readline() == "one\n"
    os.killpg(command.pid, signal.SIGINT)
    _, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 130
    assert "cavvy logs -f on" in err
    assert "cavvy stop on" in err
    assert "Traceback" not in err
    assert user.job("on").phase == "running"
    back = user.start("logs", "-f", "on")
    (user.root / "go").touch()
    out, err = back.communicate(timeout=PATIENCE_S)
    assert out == "one\ntwo\n"
    assert back.returncode == 9, err
    assert user.job("on").attempt == 1
    check_clean(user)


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_exit_codes_pass_through(user: User, code: int) -> None:
    told = user.cli("run", user.task(f"{{name: x, run: 'exit {code}'}}"), code=code)
    assert "Traceback" not in told


def test_the_bill_at_the_end_is_whole(user: User) -> None:
    user.settings("[providers.local]\nprice_usd_hr = 3600\n")
    told = user.cli("run", "--yes", user.task("{name: paid, run: 'sleep 0.5'}"))
    job = user.ended("paid")
    assert f"${job.spent_micros / 1e6:.2f} (1 attempt" in told
    check_bill(user, job)


def test_what_costs_money_is_not_run_without_consent(user: User) -> None:
    user.settings("[providers.local]\nprice_usd_hr = 3600\n")
    told = user.cli("run", user.task("{name: paid, run: 'true'}"), code=2)
    assert "--yes" in told
    assert "3,600" in told or "3600" in told
    assert user.json("ps") == []


def test_exec_runs_beside_the_work(user: User) -> None:
    name = user.submit(
        f"{{name: on, env: {{WORD: hello}}, run: 'touch here; {until(user, 'go')}'}}"
    )
    user.wait(name, "running")
    wait_until(lambda: "here" in user.cli("exec", name, "--", "ls"))
    assert user.output("exec", name, "--", "sh", "-c", "echo $WORD; exit 5", code=5) == "hello\n"
    (user.root / "go").touch()
    user.ended(name)
    assert "done" in user.cli("exec", name, "--", "true", code=1)
    check_clean(user)


def test_retry_rerun_and_diff(user: User) -> None:
    (user.work / "data.txt").write_text("first\n")
    text = """
name: vary
workdir: .
params: {level: 1}
run: |
  cat data.txt; echo level $CAVVY_PARAM_LEVEL
  test -e ROOT/good
""".replace("ROOT", str(user.root))
    user.cli("run", user.task(text), code=1)
    (user.root / "good").touch()
    (user.work / "data.txt").write_text("second\n")  # after the submission: no later run sees it
    user.cli("retry", "vary")
    user.wait("vary", lambda job: job.phase == "done")
    assert user.log("vary") == "first\nlevel 1\n" * 2
    assert [attempt.number for attempt in user.job("vary").attempts] == [1, 2]
    told = user.cli("retry", "vary", code=1)
    assert "rerun" in told
    out, err = user.start("rerun", "vary", "--param", "level=2").communicate(timeout=PATIENCE_S)
    assert "first\nlevel 2\n" in out, err
    differing = {
        row["field"]: (row["first"], row["second"]) for row in user.json("diff", "vary", "vary-2")
    }
    assert differing["task.params.level"] == (1, 2)
    assert "origin.snapshot" not in differing
    told = user.cli("rerun", "vary", "--param", "levle=2", code=1)
    assert "level" in told
    check_clean(user)


def test_a_drill_is_survived_from_the_checkpoint(user: User) -> None:
    user.settings("[providers.local]\nprice_usd_hr = 3600\n")
    run = """
  n=$(cat ckpt/n 2>/dev/null || echo 0)
  trap 'echo $n > ckpt/new; mv ckpt/new ckpt/n; echo saved $n; test -s "$CAVVY_NOTICE_FILE" && exit 75' TERM
  echo "from $n"
  while [ ! -e ROOT/go ]; do n=$((n+1)); echo $n > ckpt/new; mv ckpt/new ckpt/n; [ $n != 3 ] || echo counts; sleep 0.05; done
""".replace("ROOT", str(user.root))
    command = user.start(
        "run", "--yes", user.task(f"name: drilled\ncheckpoint: {{path: ckpt}}\nrun: |\n{run}")
    )
    user.wait("drilled", "running")
    wait_until(lambda: "counts" in user.said("drilled"))
    told = user.cli("drill", "preempt", "drilled", "--notice", "20s")
    assert "20s" in told
    user.wait("drilled", lambda job: job.attempt == 2 and job.phase == "running")
    (user.root / "go").touch()
    out, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 0, err
    saved = [line for line in out.splitlines() if line.startswith("saved")]
    resumed = [line for line in out.splitlines() if line.startswith("from")]
    assert len(saved) == 1
    assert resumed == ["from 0", f"from {saved[0].removeprefix('saved ')}"]
    job = user.ended("drilled")
    assert [attempt.outcome for attempt in job.attempts] == ["preempted", "succeeded"]
    told = user.cli("drill", "preempt", "drilled", code=1)
    assert "done" in told
    check_bill(user, job)
    check_clean(user)


def test_down_removes_everything_of_ours(user: User) -> None:
    names = [
        user.submit("{name: on, resources: {cpu: 0.1, memory: 64MiB}, run: 'sleep 300'}")
        for _ in range(2)
    ]
    names.append(user.submit("{name: big, resources: {cpu: 1}, project: other, run: 'sleep 300'}"))
    for name in names[:2]:
        user.wait(name, "running")
    assert "--yes" in user.cli("down", "--all", code=2)
    assert len(user.json("down", "--all", "--dry-run")) >= 3
    assert len(user.worked()) > 0
    user.cli("down", "--all", "--yes")
    for name in names[:2]:
        assert user.ended(name).phase == "stopped"
    wait_until(lambda: user.json("ps", "-p", "other")[0]["phase"] == "stopped")
    check_clean(user)
    assert user.json("down", "--all", "--yes") == []


def test_what_a_lost_database_left_running_is_shown_and_removed(user: User) -> None:
    """An agent that can speak learns that nobody knows its gang, and ends; one that hangs is
    found at its place.
    """
    text = "{name: NAME, grace: 1s, resources: {cpu: 0.1, memory: 64MiB}, run: 'sleep 300'}"
    for name in ("speaks", "hangs"):
        user.submit(text.replace("NAME", name))
        user.wait(name, "running")
    gangs = {name: user.job(name).attempts[0].gang for name in ("speaks", "hangs")}
    user.kill_server(signal.SIGTERM)
    for pid in user.agents():
        if gangs["hangs"].encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            kill(pid, signal.SIGSTOP)
    for path in user.home.glob("cavvy.db*"):
        path.unlink()
    assert user.json("ps") == []
    wait_until(lambda: not any(gangs["speaks"] in line for line in user.left()))
    wait_until(lambda: len(user.json("gc")) == 1)
    (found,) = user.json("gc")
    assert (found["kind"], found["name"], found["done"]) == ("gang", gangs["hangs"], False)
    assert "not in the database" in found["why"]
    assert user.worked()
    told = user.cli("gc", "--remove")  # young as it is, one look is not enough to be sure
    assert "cavvy nodes down --all" in told
    user.cli("down", "--all", "--yes")
    check_clean(user)
    wait_until(lambda: user.json("gc") == [])
