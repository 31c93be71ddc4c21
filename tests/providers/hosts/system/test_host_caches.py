"""What one project prepared on a host is neither read nor changed by the jobs of another project:
finished setups, working folders and the caches' own folders. As root and as another user, and on a
host without namespaces, which brings no Python either.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.hosts import Lab, LabHost, lab_at
from tests.system.trust import User, user_at

pytestmark = pytest.mark.system
FOLDER = ".cavvy-agent"
# A user of the host's own: the host has its own mounts.
WORKER = """
cp /etc/passwd {folder}/passwd
echo "worker:x:4242:4242::/home/worker:/bin/sh" >> {folder}/passwd
mount --bind {folder}/passwd /etc/passwd
mount -t tmpfs none /home
mkdir -p /home/worker/.ssh
cp {lab}/id.pub /home/worker/.ssh/authorized_keys
chown -R 4242:4242 /home/worker
"""
# the words of A are split in the tasks of B, so that B finds them only in what A left
OWN = """
name: {name}
workdir: private
setup: |
  echo SETUP-OF-A > marker
  echo DIR-OF-A > $CAVVY_SETUP_DIR/made
run: cat code.sh marker $CAVVY_SETUP_DIR/made; sh code.sh; {more}
resources: {{cpu: 0.1}}
"""
SEARCH = """
cd
echo "found $(find .cavvy-agent -type f 2>/dev/null | xargs grep -l 'OF''-A' 2>/dev/null | wc -l)"
"""
POISON = """
for each in $(find .cavvy-agent/cache -type d); do
  for name in marker code.sh made; do echo 'echo POISONED' > $each/$name; done
  echo 'import sys; sys.stderr.write("POISONED")' > $each/evil.pth
done
for each in $(find .cavvy-agent/cache -type f ! -name lock); do echo 'echo POISONED' > $each; done
true
"""
LINKS = """
mkdir -p elsewhere
for each in $(find .cavvy-agent/cache -depth); do rm -rf $each; ln -s $HOME/elsewhere $each; done
rm -rf .cavvy-agent/cache || true
ln -s $HOME/elsewhere .cavvy-agent/cache || true
true
"""
PROGRAMS = """
evil='import os; os.close(os.open(os.path.expanduser("~/evil-ran"), 66, 384))'
for each in .cavvy-agent/*.pyz .cavvy-agent/*.supervisor; do echo "$evil" > $each || true; done
for each in $(find .cavvy-agent/*.python -name '*.py'); do echo "$evil" > $each || true; done
mkdir -p .cavvy-agent/$(ls .cavvy-agent | grep python | head -n 1)/lib/python3.11/__pycache__ || true
true
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_at(tmp_path_factory.mktemp("lab")) as lab, lab.entered():
        yield lab


@pytest.fixture(params=["root", "worker", "bare"])
def host(lab: Lab, request: pytest.FixtureRequest) -> Iterator[LabHost]:
    """A host whose jobs run as root or as another user, or that offers jobs no namespaces."""
    if request.param == "worker":
        folder = lab.root / f"h{lab.count() + 1}"
        script = WORKER.format(folder=folder, lab=lab.root)
        host = lab.add(script=script)
        lab.ssh_config.write_text(lab.ssh_config.read_text().replace("User root", "User worker"))
    else:
        host = lab.add(bare=request.param == "bare")
    yield host
    lab.remove(host)


@pytest.fixture(params=["", "namespaces"])
def user(lab: Lab, host: LabHost, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        user.settings(
            "[providers.local]\nenabled = false\n"
            f'[providers.ssh]\nhosts = "{host.name}"\nssh_config = "{lab.ssh_config}"\n'
            f'isolation = "{request.param}"\n'
        )
        private = user.work / "private"
        private.mkdir()
        (private / "code.sh").write_text("echo CODE-OF-A\n")
        yield user
        user.cli("down", "--all", "--yes")


def run(user: User, project: str, text: str) -> str:
    """Run a task of the project to its end; what the command and the task say."""
    return user.cli("run", "--yes", "-p", project, user.task(text))


def hostile(name: str, script: str) -> str:
    lines = "".join(f"  {line}\n" for line in (SEARCH + script).strip().splitlines())
    return f"name: {name}\nresources: {{cpu: 0.1}}\nrun: |\n{lines}"


# Jobs of root, and those of a host without namespaces, run the same with them and without.
@pytest.mark.parametrize(
    ("host", "user"),
    [("root", ""), ("worker", ""), ("worker", "namespaces"), ("bare", "")],
    indirect=True,
)
def test_no_job_reads_or_changes_what_another_project_prepared(user: User) -> None:
    """Not by files, nor by links, nor by other programs, each on what the last one left."""
    for project in ("pa", "pb"):
        user.cli("project", "create", project)
    said = [run(user, "pa", OWN.format(name="first", more="true"))]
    for name, attack in (("files", POISON), ("links", LINKS), ("programs", PROGRAMS)):
        assert "found 0" in run(user, "pb", hostile(name, attack)), name
        more = "ls -a ~ | grep evil || true"
        said.append(run(user, "pa", OWN.format(name=f"after-{name}", more=more)))

    for told in said:
        assert "CODE-OF-A" in told
        assert "SETUP-OF-A" in told
        assert "DIR-OF-A" in told
        assert "POISONED" not in told
        assert "evil-ran" not in told


@pytest.mark.parametrize("user", [""], indirect=True)
def test_each_project_has_its_own_caches_in_the_home_folder(user: User, host: LabHost) -> None:
    files = ["~/.cache/pip/wheel", *([] if host.bare else ["~/.torch/w"])]
    host.run("mkdir -p ~/.cache/pip ~/.torch")
    host.run(f"for each in {' '.join(files)}; do echo USERS > $each; done")
    seen = [each.replace("~/.cache", "${XDG_CACHE_HOME:-$HOME/.cache}") for each in files]
    words = f"cat {' '.join(seen)} || true; mkdir -p {seen[0].removesuffix('/wheel')}; "
    text = "name: caches\nresources: {{cpu: 0.1}}\nrun: |\n  {words}{write}\n"
    for project in ("pa", "pb"):
        user.cli("project", "create", project)
    for project in ("pb", "pa"):
        write = f"for each in {' '.join(seen)}; do echo OF-{project} > $each; done"
        run(user, project, text.format(words=words, write=write))
    said = run(user, "pa", text.format(words=words, write="true"))
    assert said.count("OF-pa") == len(files)
    assert "OF-pb" not in said
    assert "USERS" not in said
    assert set(host.run(f"cat {' '.join(files)}").split()) == {"USERS"}
