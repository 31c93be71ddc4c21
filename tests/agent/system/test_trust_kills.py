"""kill -9 of anything at any moment: nothing finished is lost, nothing starts twice, no process
stays, bills fit.
"""

import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.system.trust import User, check_bill, check_clean, kill, user_at, wait_until
from tests.waits import PATIENCE_S

from cavvy.client.wire import JobDetail

pytestmark = pytest.mark.system
STEPS = 8


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        user.settings("[providers.local]\nprice_usd_hr = 3600\n")
        yield user


def steps(user: User, name: str, pause_s: float = 0.1, *, held: bool = False) -> str:
    """A task that counts its starts, checkpoints after every step and ends with exit code 7
    after the last. If `held`, it waits after step 4 until `let_go`.
    """
    held_at = STEPS // 2 if held else STEPS + 1
    return f"""
name: {name}
checkpoint: {{path: ckpt}}
run: |
  echo "$CAVVY_ATTEMPT" >> {user.root}/{name}.starts
  n=$(cat ckpt/n 2>/dev/null || echo 0)
  while [ $n -lt {STEPS} ]; do
    n=$((n+1)); echo "step $n"
    echo $n > ckpt/new; mv ckpt/new ckpt/n
    sleep {pause_s}
    while [ $n -ge {held_at} ] && [ ! -e {user.root}/{name}.go ]; do sleep 0.1; done
  done
  exit 7
"""


def let_go(user: User, name: str) -> None:
    (user.root / f"{name}.go").touch()


def starts(user: User, name: str) -> list[int]:
    """The attempts in which the work began."""
    path = user.root / f"{name}.starts"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def check_ran(user: User, job: JobDetail) -> None:
    """Each attempt began its work at most once, in order, and the last one went through."""
    began = starts(user, job.name)
    assert began == sorted(set(began))
    assert set(began) <= {attempt.number for attempt in job.attempts}
    assert [attempt.number for attempt in job.attempts] == list(range(1, job.attempt + 1))
    assert job.attempt in began


def check_log(user: User, job: JobDetail) -> None:
    """Every attempt's log goes on where the one before it had come to; of the last one nothing
    is missing.
    """
    seen = 0
    for attempt in job.attempts:
        lines = user.log(job.name, "--attempt", str(attempt.number)).splitlines()
        numbers = [int(line.removeprefix("step ")) for line in lines]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        seen = max([seen, *numbers])
    if job.exit_code == 7:
        assert seen == STEPS


# At chosen instants


def rows(user: User, table: str) -> int:
    try:
        with sqlite3.connect(f"file:{user.home}/cavvy.db?mode=ro", uri=True, timeout=5) as database:
            found = database.execute(f"SELECT count(*) FROM {table}").fetchone()
        database.close()
    except sqlite3.OperationalError:  # there is no such file or table yet
        return 0
    return int(found[0])


def there(user: User, pattern: str) -> bool:
    return any((user.home / "providers/local").glob(pattern))


INSTANTS: dict[str, Callable[[User], object]] = {
    "job stored": lambda user: rows(user, "jobs"),
    "intent stored": lambda user: rows(user, "attempts"),
    "gang written": lambda user: there(user, "agents/rm-*/gang.json"),
    "agent started": lambda user: there(user, "agents/rm-*/0/lock"),
    "agent recorded": lambda user: there(user, "agents/rm-*/0/started.json"),
    "claim made": lambda user: there(user, "agents/rm-*/0/claim"),
    "work granted": lambda user: there(user, "agents/rm-*/0/started"),
    "work began": lambda user: starts(user, "job"),
    "work over": lambda user: there(user, "agents/rm-*/0/exit.json"),
    "gang over": lambda user: there(user, "ended/rm-*.json"),
}


@pytest.mark.parametrize("instant", INSTANTS)
def test_a_server_killed_at_an_instant(user: User, instant: str) -> None:
    """The command that follows goes on with the next server and has the whole log and the exit
    code.
    """
    user.cli("server", "start")
    command = user.start("run", "--yes", user.task(steps(user, "job", 0.02)))
    wait_until(lambda: INSTANTS[instant](user) or command.poll() is not None, pause_s=0.01)
    user.kill_server()
    out, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 7, err
    assert out.splitlines() == [f"step {n}" for n in range(1, STEPS + 1)]
    job = user.ended("job")
    assert (job.phase, job.exit_code, job.attempt) == ("failed", 7, 1)
    assert starts(user, "job") == [1]
    assert len(user.api.jobs("default").jobs) == 1
    check_log(user, job)
    check_bill(user, job)
    check_clean(user)


def test_work_that_ends_while_no_server_runs(user: User) -> None:
    name = user.submit(
        f"{{name: job, run: 'echo a; while [ ! -e {user.root}/go ]; do sleep 0.02; done; echo b; "
        f"exit 5'}}",
        "--yes",
    )
    user.wait(name, lambda job: bool(job.attempts and job.attempts[0].running_at))
    user.kill_server()
    (user.root / "go").touch()
    wait_until(lambda: not user.worked())
    agents = user.agents()
    assert agents  # it waits with the end of the log and the exit code for somebody to tell
    assert user.log(name, "-f", "--rank", "0", "--attempt", "1") == "a\nb\n"
    job = user.ended(name)
    assert (job.phase, job.exit_code, job.attempt) == ("failed", 5, 1)
    check_bill(user, job)
    check_clean(user)


def test_a_killed_task_is_told_and_not_tried_again(user: User) -> None:
    command = user.start(
        "run", "--yes", user.task("{name: job, run: 'sleep 300 & echo up; sleep 300'}")
    )
    user.wait("job", "running")
    wait_until(lambda: "up" in user.said("job"))
    shell = min(user.worked())
    kill(shell)
    _, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 137, err
    job = user.ended("job")
    assert (job.phase, job.exit_code, job.attempt) == ("failed", 137, 1)
    assert "signal 9" in job.reason
    check_bill(user, job)
    check_clean(user)


def test_a_killed_agent_leaves_nothing_and_the_next_attempt_resumes(user: User) -> None:
    name = user.submit(steps(user, "job", held=True), "--yes")
    wait_until(lambda: "step 3" in user.said(name))
    for pid in user.agents():  # the reaper too: nobody is left who could tidy up
        kill(pid)
    let_go(user, name)
    job = user.ended(name)
    if job.attempts[0].outcome == "exit":  # without its own processes, the work may have done this
        assert (job.phase, job.exit_code, job.attempt) == ("failed", 137, 1)
        check_clean(user)
        return
    assert (job.phase, job.exit_code, job.attempt) == ("failed", 7, 2)
    assert job.attempts[0].outcome == "node"
    first, second = (user.log(name, "--attempt", number).splitlines() for number in ("1", "2"))
    assert "step 1" in first
    assert "step 1" not in second
    assert second[-1] == f"step {STEPS}"
    check_ran(user, job)
    check_bill(user, job)
    check_clean(user)


def test_a_killed_command_harms_nothing(user: User) -> None:
    command = user.start("run", "--yes", user.task(steps(user, "job", 0.05)))
    wait_until(lambda: starts(user, "job"))
    kill(command.pid)
    command.communicate()
    assert command.returncode == -signal.SIGKILL
    job = user.ended("job")
    assert (job.exit_code, job.attempt, starts(user, "job")) == (7, 1, [1])
    check_log(user, job)
    check_clean(user)


@pytest.mark.parametrize("wish", ["stop", "drill", "retry"])
def test_a_wish_that_was_answered_outlives_the_server(user: User, wish: str) -> None:
    """What a command reported as done is done by the next server, once."""
    task = steps(user, "job", held=wish != "retry")  # the command must come before the work's end
    name = user.submit(task.replace("exit 7", "test $CAVVY_ATTEMPT != 1"), "--yes")
    if wish == "retry":
        user.ended(name)
    else:
        wait_until(lambda: "step 2" in user.said(name))
    user.cli(
        *{"stop": ("stop", "--no-wait"), "drill": ("drill", "preempt", "--notice", "0s")}.get(
            wish, (wish,)
        ),
        name,
    )
    user.kill_server()
    let_go(user, name)
    user.cli("ps")
    job = user.wait(name, lambda job: job.phase in (("stopped",) if wish == "stop" else ("done",)))
    job = user.ended(name)
    assert [attempt.outcome for attempt in job.attempts] == {
        "stop": ["stopped"],
        "drill": ["preempted", "succeeded"],
        "retry": ["exit", "succeeded"],
    }[wish]
    check_ran(user, job)
    check_bill(user, job)
    check_clean(user)


# At any instants


@pytest.mark.parametrize("seed", range(5))
def test_several_killed_at_any_moments(user: User, seed: int) -> None:
    dice = random.Random(seed)
    for number in range(5):
        play_round(user, dice, f"job{number}")
    check_clean(user)


def play_round(user: User, dice: random.Random, name: str) -> None:
    victims = dice.sample(["cli", "server", "agent", "task", "server again"], dice.randint(1, 3))
    plan = sorted((dice.uniform(0, 1.4), victim) for victim in victims)
    command = user.start("run", "--yes", user.task(steps(user, name), f"{name}.yaml"))
    pipes = threading.Thread(target=command.communicate, daemon=True)
    pipes.start()
    began = time.monotonic()
    for due, victim in plan:
        time.sleep(max(0.0, began + due - time.monotonic()))
        match victim:
            case "cli":
                kill(command.pid)
            case "agent":
                for pid in user.agents():
                    kill(pid)
            case "task":
                for pid in user.worked():
                    kill(pid)
            case _:
                user.kill_server()
    if "cli" in victims:
        pipes.join(60)
        if not user.has(name):
            return  # it was killed before it had asked for anything
    told = f"{name}: {plan}"
    job = user.ended(name)
    pipes.join(60)
    assert not pipes.is_alive(), told
    killed = {"task", "agent"} & {*victims}
    assert job.exit_code == 7 or (killed and job.exit_code == 137), told
    assert command.returncode in (
        job.exit_code,
        -signal.SIGKILL if "cli" in victims else job.exit_code,
    ), told
    assert job.attempt == 1 or "agent" in victims, told
    check_ran(user, job)
    check_log(user, job)
    check_bill(user, job)
