"""Jobs on this machine do not see the server's folder; its owner can turn that off."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.system.trust import User
from tests.waits import wait_until

from cavvy.agent.bundle import make_command

pytestmark = pytest.mark.system

LOOK = """
home=${CAVVY_PROGRESS_FILE%%/providers/*}
for name in token key agents.key cavvy.db logs storage/other; do
    [ ! -e "$home/$name" ] || echo "sees $name"
done
ls "$home/providers/local/gangs" | wc -l
cat /proc/$PPID/root$home/token 2>/dev/null || true
umount "$home" 2>/dev/null && echo uncovered || true
unshare -Urm umount "$home" 2>/dev/null && echo uncovered || true
echo looked >state/file
"""
TASK = "checkpoint: state\nsetup: echo >$CAVVY_SETUP_DIR/made\nrun: |\n"


def look(user: User, name: str) -> list[str]:
    script = "".join(f"  {line}\n" for line in LOOK.splitlines())
    user.submit(f"name: {name}\n{TASK}{script}")
    assert user.ended(name).phase == "done", user.log(name)
    return user.log(name).splitlines()


def test_a_job_sees_nothing_of_the_server_or_of_other_jobs(user: User, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    tried = [*make_command(), "--protects", str(tmp_path), str(tmp_path / "kept")]
    if not subprocess.run(tried, capture_output=True).stdout.strip():
        pytest.skip("this system offers no namespaces")
    user.submit("name: other\nrun: sleep 600")
    user.wait("other", "running")
    assert look(user, "curious") == ["1"]
    assert look(user, "again") == ["1"]  # with a finished setup
    (tmp_path / "input").write_text("shared")
    user.submit(
        f"name: pair\nnodes: 2\nresources: {{cpu: 0.1}}\nrun: cat {tmp_path}/link\n"
        f"inputs: [{{source: {tmp_path}/input, target: {tmp_path}/link}}]\n"
    )
    assert user.ended("pair").phase == "done", user.log("pair")
    assert "hidden from jobs, containers, `cavvy exec`" in user.cli("check", "local")
    user.submit("name: still\nrun: readlink /proc/self/ns/mnt; sleep 600")
    user.wait("still", "running")
    wait_until(lambda: "mnt:" in user.log("still"))
    for command in ("exec", "ssh"):
        assert user.output(command, "still", "--", "ls", str(user.home)) == "providers\n"
        inside = user.output(command, "still", "--", "readlink", "/proc/self/ns/mnt")
        assert inside == user.log("still")
    assert "No such file" in user.cli("cp", f"still:{user.home}/token", "token", code=1)


LINKS = """
home=${CAVVY_PROGRESS_FILE%%/providers/*}
mkdir out && echo mine >out/mine && ln -s mine out/last
ln -s "$home/token" out/token
ln -s "$home/token" "$(dirname "$CAVVY_PROGRESS_FILE")/exit.json"
mv "$(dirname "$CAVVY_PROGRESS_FILE")" moved 2>/dev/null && echo moved || true
"""


def test_links_that_a_job_places_show_nothing_of_the_server(user: User, tmp_path: Path) -> None:
    if "hidden from jobs" not in user.cli("check", "local"):
        pytest.skip("this system offers no namespaces")
    user.cli("secret", "list")  # starts the server
    token = (user.home / "token").read_text()
    script = "".join(f"  {line}\n" for line in LINKS.splitlines())
    outputs = f"[{{source: out, target: {tmp_path}/copied}}]"
    user.submit(f"name: linker\noutputs: {outputs}\nrun: |\n{script}")
    assert user.ended("linker").phase == "done", user.log("linker")
    [told] = user.log("linker").splitlines()
    assert told == (
        "cavvy: token of the output out was not copied: a symbolic link leads out of the job's "
        f"folders, to {user.home}/token"
    )
    assert {each.name: each.read_text() for each in (tmp_path / "copied").iterdir()} == {
        "mine": "mine\n",
        "last": "mine\n",
    }
    assert (user.home / "token").read_text() == token


BEFORE: dict[str, dict[str, Any]] = {
    "git": {
        "workdir": {"git": "ssh://nowhere.invalid/model.git", "commit": "0" * 40},
        "env": {"GIT_SSH_COMMAND": "cat HOME/token >&2; false &&"},
    },
    "python3": {"workdir": ".", "env": {"PATH": "work:/usr/bin:/bin"}, "setup": "true"},
}


@pytest.mark.parametrize("program", BEFORE)
def test_programs_that_run_before_the_work_see_nothing_of_the_server(
    user: User, program: str
) -> None:
    if "hidden from jobs" not in user.cli("check", "local"):
        pytest.skip("this system offers no namespaces")
    user.cli("secret", "list")  # starts the server
    script = user.work / program
    script.write_text(f"#!/bin/sh\ncat {user.home}/token >&2\nexit 1\n")
    script.chmod(0o755)
    task = json.dumps({"name": "before", "run": "true", **BEFORE[program]})
    user.submit(task.replace("HOME", str(user.home)))
    user.ended("before")
    assert "No such file" in user.log("before")
    assert (user.home / "token").read_text().strip() not in user.log("before")


SPIES = """
mkdir bin && printf '#!/bin/sh\\ncat HOME/token >HOME/stolen\\n' >bin/py-spy
chmod +x bin/py-spy
exec python3 -c 'import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()'
"""


def test_the_tool_that_takes_stacks_is_not_chosen_by_the_work(user: User) -> None:
    if "hidden from jobs" not in user.cli("check", "local"):
        pytest.skip("this system offers no namespaces")
    script = "".join(f"  {line}\n" for line in SPIES.replace("HOME", str(user.home)).splitlines())
    user.submit(
        "name: spies\nlimits: {stuck: 10s}\nretry: {node: 0}\n"
        f"env: {{PATH: 'work/bin:/usr/bin:/bin'}}\nrun: |\n{script}"
    )
    job = user.ended("spies")
    assert job.phase == "failed", user.log("spies")
    assert "stuck" in {kind for kind, _ in user.scenario("spies")}  # its stacks were looked for
    assert not (user.home / "stolen").exists()


def test_the_owner_may_show_it(user: User) -> None:
    user.settings("[providers.local]\nhide_server = false\n")
    assert "sees token" in look(user, "open")
    assert "readable by jobs" in user.cli("check", "local")
