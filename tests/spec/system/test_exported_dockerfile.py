"""`cavvy export dockerfile`: the files are built by buildah, on small images of the host's busybox.
The images have stand-ins of apt-get, python3 and pip, which write down how they were called.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.cli.main import cli
from cavvy.spec.dockerfile import PYTHON

pytestmark = pytest.mark.system
TOOLS = ("sh", "cat", "printf", "mkdir", "rm", "chmod")
# a stand-in of each program: it writes its arguments into a file of its name
RECORD = '#!/bin/sh\necho "$@" >>/{name}.calls\n'
PYTHON3 = (
    '#!/bin/sh\necho "$@" >>/python3.calls\n[ "$1 $2" = "-m venv" ] || exit 0\n'
    'mkdir -p "$3/bin"\n'
    'printf \'#!/bin/sh\\necho "$@" >>/opt/venv/installed\\n\' >"$3/bin/pip"\n'
    'chmod 755 "$3/bin/pip"\n'
)


class Buildah:
    """Buildah with a storage of its own. It needs neither a daemon nor namespaces."""

    def __init__(self, folder: Path) -> None:
        found, busybox = shutil.which("buildah"), shutil.which("busybox")
        if found is None or busybox is None:
            pytest.skip("buildah or busybox is not installed here")
        self._folder, self._busybox = folder, busybox
        self._command = [
            *(found, "--storage-driver", "vfs"),
            *("--root", str(folder / "root"), "--runroot", str(folder / "run")),
        ]
        self.context = folder / "context"
        self.context.mkdir()

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
        argv = [*self._command, *words]
        return subprocess.run(argv, capture_output=True, text=True, env=env, check=False)

    def make_base(self, name: str, *, bash: bool) -> None:
        """Make an image with busybox and the stand-ins. Skips where buildah cannot build."""
        folder = self._folder / "base"
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(self._busybox, folder / "bin/busybox")
        for tool in TOOLS:
            (folder / "bin" / tool).unlink(missing_ok=True)
            (folder / "bin" / tool).symlink_to("busybox")
        programs = {"apt-get": RECORD.format(name="apt-get"), "python3": PYTHON3}
        programs |= {"bash": '#!/bin/sh\nexec /bin/sh "$@"\n'} if bash else {}
        for program, text in programs.items():
            (folder / "bin" / program).write_text(text)
            (folder / "bin" / program).chmod(0o755)
        (folder / "Dockerfile").write_text(
            "FROM scratch\nCOPY bin /bin\nRUN mkdir -p /tmp /opt /var/lib/apt/lists\n"
        )
        done = self.call("build", "--pull-never", "--tag", name, str(folder))
        if done.returncode:
            pytest.skip(f"buildah cannot build here: {done.stderr.strip()[-300:]}")

    def build(self, dockerfile: Path) -> str:
        """Build an image, and return what a program in it prints of its files."""
        options = ("--pull-never", "--tag", "localhost/out:1", "--file", str(dockerfile))
        done = self.call("build", *options, str(self.context))
        assert done.returncode == 0, done.stderr
        box = self.call("from", "--pull-never", "localhost/out:1").stdout.strip()
        shown = self.call(
            *("run", box, "--", "busybox", "sh", "-c"),
            "busybox find / -xdev -type f -not -path '/proc/*' -not -path '/sys/*'; pwd; echo $PATH; "
            "busybox grep -r . /*.calls /opt/venv/installed /made 2>/dev/null; "
            "true",
        )
        assert shown.returncode == 0, shown.stderr
        return shown.stdout


@pytest.fixture
def buildah(tmp_path: Path) -> Buildah:
    return Buildah(tmp_path)


def export(task: Path) -> Path:
    done = CliRunner().invoke(cli, ["export", "dockerfile", str(task)])
    assert done.exit_code == 0, done.output
    file = task.with_name("Dockerfile")
    file.write_text(done.stdout)
    return file


def test_a_setup_runs_in_the_image_of_the_task(buildah: Buildah) -> None:
    buildah.make_base("localhost/base:1", bash=False)
    (buildah.context / "word").write_text("hello\n")
    task = buildah.context / "task.yaml"
    task.write_text(
        "name: t\nimage: localhost/base:1\nworkdir: .\nrun: x\nenv: {A: \"b 'c' $d\"}\n"
        "setup: |\n  cat word >/made\n  printf '%s\\n' \"$A\" 'two  \"quotes\"' >>/made\n"
    )
    shown = buildah.build(export(task))
    assert "/made:hello\n" in shown
    assert "/made:b 'c' $d\n" in shown
    assert '/made:two  "quotes"\n' in shown
    assert "\n/work\n" in shown


def test_packages_are_installed_in_a_stage_of_their_own(buildah: Buildah) -> None:
    buildah.make_base(PYTHON, bash=True)
    (buildah.context / "requirements.txt").write_text("numpy\n")
    task = buildah.context / "task.yaml"
    task.write_text(
        "name: t\nworkdir: .\nrun: x\nsetup: |\n"
        "  sudo apt-get install -y libgl1\n  pip install -r requirements.txt\n"
    )
    shown = buildah.build(export(task))
    assert "/opt/venv/installed:install -r requirements.txt\n" in shown
    assert "libgl1" in shown
    assert "/opt/venv/bin:" in shown
    assert "/python3.calls" not in shown  # the stage's own files are not in the image
    assert "requirements.txt\n/" not in shown
