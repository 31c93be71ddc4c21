"""Jobs on real SSH hosts, by the real command and server: drills, gangs, GPUs, cut lines, dead
hosts and servers.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tests.cli.system.test_tour import HOSTS, follow_page
from tests.pages import ROOT, read_blocks
from tests.system.hosts import Lab, lab_at, worked
from tests.system.packages import install_packages
from tests.system.server_state import home_with_jobs
from tests.system.trust import User, user_at, wait_until

pytestmark = pytest.mark.system
LOST_AFTER_S = 4
# A training in small: it counts the steps that its checkpoint has not, and says where it went on.
STEPS = """
name: {name}
checkpoint: {{path: ckpt}}
run: |
  n=$(cat ckpt/n 2>/dev/null || echo 0)
  echo "from $n on $(hostname)"
  trap 'echo noticed; exit 75' TERM
  while [ $n -lt {steps} ]; do
    n=$((n+1)); echo "step $n"
    echo $n > ckpt/new; mv ckpt/new ckpt/n
    sleep {pause_s} & wait $!
  done
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_at(tmp_path_factory.mktemp("lab")) as lab:
        lab.add(gpus=2)
        lab.add(gpus=2)
        with lab.entered():
            yield lab


@pytest.fixture
def user(lab: Lab, tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        use(user, lab)
        yield user
        user.cli("down", "--all", "--yes")
        wait_until(lambda: not user.api.nodes())
        wait_until(
            lambda: not [line for host in lab.hosts for line in worked(host)],
            lambda: "work is left on a host",
        )


def use(user: User, lab: Lab, lost_after_s: int = LOST_AFTER_S) -> None:
    user.settings(
        "[providers.local]\nenabled = false\n"
        f'[providers.ssh]\nhosts = "h1 h2"\nssh_config = "{lab.ssh_config}"\nlost_after_s = '
        f"{lost_after_s}\n"
    )


def says(user: User) -> set[str]:
    """The hosts that `cavvy check ssh` shows what they have."""
    told = user.json("check", "ssh", code=None)
    return {fact["what"] for fact in told["facts"] if "Python" in fact["value"]}


def host_of(user: User, name: str) -> str:
    """Where a running job's log says it is."""
    return user.log(name).split(" on ")[1].split()[0]


def test_a_drill_is_survived_from_the_checkpoint(user: User) -> None:
    name = user.submit(STEPS.format(name="drilled", steps=60, pause_s=0.1))
    wait_until(lambda: "step 3" in user.said(name), lambda: str(user.scenario(name)))
    user.cli("drill", "preempt", name, "--notice", "10s")
    job = user.ended(name)
    assert job.phase == "done", user.scenario(name)
    assert job.attempt == 2
    again = user.log(name, "--attempt", "2")
    assert "from 0" not in again
    assert "step 60" in again


def test_the_tutorial_was_executed_as_written(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's settings are used as they stand; its names of hosts stand for those of the lab."""
    (settings,) = (each.text for each in read_blocks(ROOT / HOSTS) if each.language == "toml")
    known = tmp_path / "ssh_config"
    known.write_text(re.sub(r"^Host h", "Host gpu-", lab.ssh_config.read_text(), flags=re.M))
    client = tmp_path / "bin/ssh"  # OpenSSH reads no other home folder than that of /etc/passwd
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {known} "$@"\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    (tmp_path / "settings.toml").write_text(f'{settings}ssh_config = "{known}"\n')
    with home_with_jobs(tmp_path / "home"):
        follow_page(HOSTS, tmp_path / "tour")


def test_ranks_on_two_hosts_talk_to_each_other(user: User) -> None:
    name = user.submit(
        """
name: pair
nodes: 2
run: |
  exec python3 - <<'PY'
  import os, socket, time
  rank, port = int(os.environ["NODE_RANK"]), int(os.environ["MASTER_PORT"])
  assert os.environ["NNODES"] == "2"
  if rank == 0:
      with socket.create_server(("0.0.0.0", port)) as server:
          peer, address = server.accept()
          print("hello", address[0], peer.recv(100).decode())
  else:
      for _ in range(200):
          try:
              peer = socket.create_connection((os.environ["MASTER_ADDR"], port), 1)
              break
          except OSError:
              time.sleep(0.1)
      peer.sendall(f"from {socket.gethostname()} of {os.environ['CAVVY_HOSTS']}".encode())
  PY
"""
    )
    job = user.ended(name)
    assert job.phase == "done", (user.scenario(name), user.log(name))
    said = user.log(name)
    assert "hello 10.99.0.2 from h2 of" in said
    assert "10.99.0.1" in said


@pytest.mark.timeout(600)
def test_mpirun_starts_its_processes_on_all_hosts_without_ssh_between_them(user: User) -> None:
    why = "" if shutil.which("mpirun") else install_packages(["openmpi-bin"])
    if shutil.which("mpirun") is None:
        pytest.skip(f"needs mpirun: {why}")
    name = user.submit(
        """
name: mpi
nodes: 2
run: |
  $CAVVY_MPI mpirun --oversubscribe -np 4 --map-by node \\
      sh -c 'echo "process $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE on $(hostname)"'
"""
    )
    job = user.ended(name)
    assert job.phase == "done", (user.scenario(name), user.log(name))
    said = sorted(
        line.partition("process ")[2] for line in user.log(name).splitlines() if "process " in line
    )
    assert said == ["0 of 4 on h1", "1 of 4 on h2", "2 of 4 on h1", "3 of 4 on h2"]


def test_jobs_on_a_host_never_share_a_gpu(user: User, lab: Lab) -> None:
    # The job tells when it held the GPU, because the server notes when it heard of that.
    run = 'echo "$(hostname) $CUDA_VISIBLE_DEVICES"; date +%s.%N; sleep 1; date +%s.%N'
    names = [
        user.submit(f"{{name: gpu{n}, resources: {{gpu: T4}}, run: '{run}'}}") for n in range(6)
    ]
    jobs = [user.ended(name) for name in names]
    assert [job.phase for job in jobs] == ["done"] * 6
    held: dict[str, list[tuple[float, float]]] = {}
    for job in jobs:
        host, name, since, until = user.log(job.name).split()
        held.setdefault(f"{host} {name}", []).append((float(since), float(until)))
    assert set(held) <= {
        f"{host} {name}" for host in ("h1", "h2") for name in ("0", "1", *gpus(host))
    }
    for spans in held.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(spans))), held


def gpus(host: str) -> list[str]:
    return [f"GPU-{int(host[1:]):04x}-{n:04x}" for n in range(2)]


def test_fifteen_short_jobs(user: User) -> None:
    names = [user.submit(f"{{name: short{n}, run: 'echo {n}; exit {n % 3}'}}") for n in range(15)]
    jobs = [user.ended(name) for name in names]
    assert [job.exit_code for job in jobs] == [n % 3 for n in range(15)]
    assert all(user.log(name).split() == [str(n)] for n, name in list(enumerate(names))[::7])


def test_stop_ends_the_work_on_the_host(user: User, lab: Lab) -> None:
    name = user.submit(STEPS.format(name="stopped", steps=10000, pause_s=0.1))
    user.wait(name, "running")
    user.cli("stop", name)
    assert user.ended(name).phase == "stopped"
    wait_until(lambda: not worked(lab.hosts[0]) and not worked(lab.hosts[1]))


def test_work_goes_on_while_the_server_is_dead(user: User) -> None:
    name = user.submit(STEPS.format(name="alone", steps=60, pause_s=0.1))
    wait_until(lambda: "step 2" in user.said(name))
    user.kill_server()
    time.sleep(3)
    job = user.ended(name)
    assert (job.phase, job.attempt) == ("done", 1), user.scenario(name)
    assert [line for line in user.log(name).splitlines() if line.startswith("step")] == [
        f"step {n + 1}" for n in range(60)
    ]


def test_a_cut_line_loses_nothing(user: User, lab: Lab) -> None:
    use(
        user, lab, lost_after_s=120
    )  # a host that is cut off for longer than this is taken for dead
    name = user.submit(STEPS.format(name="cut", steps=100, pause_s=0.1))
    wait_until(lambda: "step 2" in user.said(name))
    host = next(each for each in lab.hosts if each.name == host_of(user, name))
    host.cut()
    time.sleep(20)
    before = user.log(name)
    host.mend()
    job = user.ended(name)
    assert "step 100" not in before
    assert (job.phase, job.attempt) == ("done", 1), user.scenario(name)
    assert [line for line in user.log(name).splitlines() if line.startswith("step")] == [
        f"step {n + 1}" for n in range(100)
    ]


def test_a_dead_host_costs_one_attempt(user: User, lab: Lab) -> None:
    name = user.submit(STEPS.format(name="orphan", steps=40, pause_s=0.1))
    wait_until(lambda: "step 3" in user.said(name))
    host = next(each for each in lab.hosts if each.name == host_of(user, name))
    host.kill()
    try:
        job = user.ended(name)
        assert (job.phase, job.attempt) == ("done", 2), user.scenario(name)
        assert f" on {host.name}" not in user.log(name, "--attempt", "2")
        assert any("counts as dead" in text for _, text in user.scenario(name))
    finally:
        host.start()
    wait_until(lambda: host.name in says(user), lambda: str(says(user)))
    assert not worked(host)


def test_a_job_on_a_host_without_python(user: User, lab: Lab) -> None:
    bare = lab.add(bare=True)
    try:
        assert "not found" in bare.run("python3 2>&1 || true")
        user.settings(user.config.read_text().replace("h1 h2", bare.name))
        name = user.submit(STEPS.format(name="bare", steps=5, pause_s=0.1))
        job = user.ended(name)
        assert job.phase == "done", user.scenario(name)
        assert f"on {bare.name}" in user.log(name)
        user.cli("down", "--all", "--yes")
        wait_until(lambda: not bare.run("ps | grep '[.]pyz' || true"))
    finally:
        lab.remove(bare)


def test_a_host_that_was_started_anew_is_no_mystery(user: User, lab: Lab) -> None:
    name = user.submit(STEPS.format(name="reboot", steps=40, pause_s=0.1))
    wait_until(lambda: "step 3" in user.said(name))
    host = next(each for each in lab.hosts if each.name == host_of(user, name))
    host.kill()
    host.start()
    job = user.ended(name)
    assert (job.phase, job.attempt) == ("done", 2), user.scenario(name)
    assert not any("counts as dead" in text for _, text in user.scenario(name))


def test_jobs_wait_for_hosts_that_are_down(user: User, lab: Lab) -> None:
    user.ended(user.submit("{name: before, run: 'true'}"))
    for host in lab.hosts:
        host.kill()
    try:
        wait_until(lambda: not says(user))
        time.sleep(6)  # what was offered a few seconds ago is not asked for anew
        name = user.submit("{name: patient, run: 'echo here'}")
        wait_until(lambda: "cannot be used" in user.job(name).reason)
        job = user.job(name)
        assert job.phase == "queued", user.scenario(name)
        assert "ssh/h1" in job.reason
        assert "`cavvy check ssh`" in job.reason
        assert any(text == job.reason for _, text in user.scenario(name))
        assert job.reason in (user.home / "server.log").read_text()
        every = user.cli("offers", "--provider", "ssh", code=None)
        assert every.count(" fails\n") == every.count("\nssh ") > 0
        assert " fails" not in user.cli("offers", "--ready", code=None)
        assert " fails " in user.cli("run", "--dry-run", "--", "true", code=None)
    finally:
        for host in lab.hosts:
            host.start()
    assert user.ended(name).phase == "done", user.scenario(name)


def test_jobs_share_a_machine_on_one_host_across_a_restart_of_the_server(user: User) -> None:
    one = ("run", "--machine", "dev", "--keep", "5m", "--gpu", "any:1", "--", "hostname")
    user.cli(*one)
    [first] = user.json("machines")
    assert (first["state"], first["has"]) == ("idle", "1 x T4, 1 CPU")
    user.cli("server", "stop")
    again = user.cli("run", "--machine", "dev", "--", "hostname; nvidia-smi -L | wc -l")
    assert first["placement"].split("/")[1] in again
    [second] = user.json("machines")
    assert second["since"] == first["since"], "it is the same gang"
    user.cli("machines", "stop", "dev")
    assert user.json("nodes") == []
