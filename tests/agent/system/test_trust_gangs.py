"""Gangs on this machine: ranks know each other, fail as one, stop in their grace; who waits, and
who holds what.
"""

from contextlib import suppress
from pathlib import Path

import pytest
from tests.drivers import make_driver
from tests.system.trust import User, check_clean, kill, wait_until

pytestmark = pytest.mark.system
SMALL = "resources: {cpu: 0.1, memory: 64MiB}"

# Meets as torchrun's workers do: rank 0 listens at the address that all were given, and hears of
# everybody.
MEET = """
import os, socket, time
e = os.environ
assert (e["NNODES"], e["NPROC_PER_NODE"], e["CAVVY_RANK"]) == ("3", "1", e["NODE_RANK"]), dict(e)
assert len(e["CAVVY_HOSTS"].split(",")) == 3
where, me = (e["MASTER_ADDR"], int(e["MASTER_PORT"])), e["NODE_RANK"]
if me == "0":
    with socket.create_server(where) as server:
        peers = [server.accept()[0] for _ in range(2)]
        met = sorted(peer.recv(1).decode() for peer in peers)
        for peer in peers:
            peer.sendall("".join(met).encode())
    print("met", *met)
else:
    while True:
        try:
            peer = socket.create_connection(where)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    peer.sendall(me.encode())
    print("heard", peer.recv(2).decode())
"""


def check_ranks_meet(user: User, resources: str) -> None:
    (user.work / "meet.py").write_text(MEET)
    task = f"name: meet\nnodes: 3\nworkdir: .\n{resources}\nrun: python3 meet.py"
    user.cli("run", user.task(task))
    said = [user.log("meet", "--rank", str(rank)) for rank in range(3)]
    assert said == ["met 1 2\n", "heard 12\n", "heard 12\n"]


def test_ranks_meet_at_the_master_and_each_has_a_log(user: User) -> None:
    check_ranks_meet(user, SMALL)
    assert len(user.ended("meet").attempts[0].nodes) == 3
    check_clean(user)


def test_a_failed_rank_stops_the_others_and_gives_its_exit_code(user: User) -> None:
    run = """
      echo "rank $NODE_RANK began"
      if [ $NODE_RANK = 1 ]; then while [ ! -e ROOT/go ]; do sleep 0.05; done; exit 42; fi
      trap 'echo "rank $NODE_RANK was told"; exit 1' TERM
      touch ROOT/$NODE_RANK; while true; do sleep 0.05; done
    """.replace("ROOT", str(user.root))
    command = user.start(
        "run", user.task(f"name: fall\nnodes: 3\ngrace: 30s\n{SMALL}\nrun: |\n{run}")
    )
    wait_until(lambda: (user.root / "0").exists() and (user.root / "2").exists())
    (user.root / "go").touch()
    out, err = command.communicate(
        timeout=25
    )  # well before the grace of those that end when they are told
    assert command.returncode == 42, err
    job = user.ended("fall")
    assert (job.phase, job.exit_code, job.attempt) == ("failed", 42, 1)
    assert job.attempts[0].first_failed_rank == 1
    assert "on rank 1" in job.reason
    assert [user.log("fall", "--rank", str(rank)).count("told") for rank in range(3)] == [1, 0, 1]
    assert all(f"rank {rank} began" in out for rank in range(3))
    check_clean(user)


def test_a_killed_rank_takes_the_gang_along_and_all_begin_again(user: User) -> None:
    run = (
        f"echo $NODE_RANK.$CAVVY_ATTEMPT >> {user.root}/starts; while [ ! -e {user.root}/go ]; "
        "do sleep 0.05; done"
    )
    name = user.submit(f"name: hurt\nnodes: 3\nretry: {{exit: 1}}\n{SMALL}\nrun: '{run}'")
    wait_until(
        lambda: (
            (user.root / "starts").exists() and len((user.root / "starts").read_text().split()) == 3
        )
    )
    user.wait(name, "running")
    for pid in user.agents():
        with suppress(OSError):  # a part of an agent that has ended meanwhile
            if b"/1/config.json" in Path(f"/proc/{pid}/cmdline").read_bytes():
                kill(pid)
    user.wait(name, lambda job: job.attempt == 2 and job.phase == "running")
    (user.root / "go").touch()
    job = user.ended(name)
    assert (job.phase, job.attempt) == ("done", 2)
    # without its own processes, the work may have done this
    assert job.attempts[0].outcome in ("node", "exit")
    starts = sorted((user.root / "starts").read_text().split())
    assert starts == ["0.1", "0.2", "1.1", "1.2", "2.1", "2.2"]
    check_clean(user)


def test_stop_ends_what_ignores_it_when_the_grace_is_over(user: User) -> None:
    run = "trap '' TERM; echo deaf; while true; do sleep 0.1; done"
    name = user.submit(f'name: deaf\nnodes: 2\ngrace: 1s\n{SMALL}\nrun: "{run}"')
    wait_until(lambda: "deaf" in user.said(name, 1) and "deaf" in user.said(name))
    told = user.cli("stop", name)
    assert "stopped" in told
    job = user.ended(name)
    assert (job.phase, job.attempts[0].outcome) == ("stopped", "stopped")
    check_clean(user)


def test_more_jobs_than_cpus_wait_in_their_order_and_say_their_place(user: User) -> None:
    user.settings("[providers.local]\ncpus = 1\n")
    text = (
        "{name: NAME, PRIORITY resources: {cpu: 1}, run: 'echo NAME >> ROOT/order; ONE sleep 0.1'}"
    )
    text = text.replace("ROOT", str(user.root))
    hold = f"while [ ! -e {user.root}/go ]; do sleep 0.05; done;"
    user.submit(text.replace("NAME", "a").replace("PRIORITY", "").replace("ONE", hold))
    user.wait("a", "running")
    for name, priority in (("b", ""), ("c", ""), ("d", "priority: 5,")):
        user.submit(text.replace("NAME", name).replace("PRIORITY", priority).replace("ONE", ""))
    assert [user.job(name).queue_position for name in "bcd"] == [2, 3, 1]
    assert "position 2" in user.cli("status", "b")
    wait_until(lambda: "CPU" in user.job("d").reason or "a" in user.job("d").reason)
    assert user.cli("ps").count("queued") == 3
    (user.root / "go").touch()
    for name in "abcd":
        assert user.ended(name).phase == "done"
    assert (user.root / "order").read_text().split() == ["a", "d", "b", "c"]
    check_clean(user)


@pytest.fixture
def driver(user: User) -> None:
    user.variables["LD_LIBRARY_PATH"] = str(make_driver(user.root / "driver"))


@pytest.mark.usefixtures("driver")
def test_no_two_jobs_hold_the_same_device(user: User) -> None:
    """Six jobs of one GPU each on two GPUs, with the server killed in between: each has one of
    its own, always.
    """
    run = f"""
      lock={user.root}/gpu$CUDA_VISIBLE_DEVICES
      mkdir $lock || {{ echo "GPU $CUDA_VISIBLE_DEVICES is held by another"; exit 9; }}
      echo "$CUDA_VISIBLE_DEVICES" >> {user.root}/held
      until [ $(sort -u {user.root}/held | wc -l) = 2 ]; do sleep 0.05; done  # two run at once
      sleep 0.4; rmdir $lock
    """
    names = [
        user.submit(f"name: gpu\nresources: {{gpu: 'A100:1', cpu: 0.1}}\nrun: |\n{run}")
        for _ in range(6)
    ]
    user.wait(names[0], lambda job: job.phase in ("running", "done"))
    holding = [row["devices"] for row in user.json("nodes")]
    assert len({device for devices in holding for device in devices}) == sum(
        len(devices) for devices in holding
    )
    user.kill_server()
    for name in names:
        assert user.ended(name).phase == "done", user.log(name)
    held = (user.root / "held").read_text().split()
    assert len(held) == 6
    assert set(held) == {"0", "1"}
    check_clean(user)


@pytest.mark.usefixtures("driver")
def test_what_holds_no_device_sees_none_and_what_never_fits_is_refused(user: User) -> None:
    user.cli("run", user.task("{name: none, run: 'test -z \"$CUDA_VISIBLE_DEVICES\"'}"))
    two = (
        "{name: two, resources: {gpu: 'A100:2'}, run: 'test "
        '"$CUDA_VISIBLE_DEVICES$NPROC_PER_NODE" = 0,12\'}'
    )
    user.cli("run", user.task(two))
    told = user.cli(
        "run", user.task("{name: three, resources: {gpu: 'A100:3'}, run: 'true'}"), code=1
    )
    assert "A100" in told
    check_clean(user)
