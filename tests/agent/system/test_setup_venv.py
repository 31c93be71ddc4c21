"""A setup installs into its job's own virtual environment, and never into the server's."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.agent_server import make_rig
from tests.system.server_state import home_with_jobs

from cavvy import agent

pytestmark = pytest.mark.system

SERVERS = Path(sysconfig.get_path("purelib"))
HERE = Path(agent.__file__).parent
INSTALL = "pip install --quiet --no-index --disable-pip-version-check ./bay-1-py3-none-any.whl"


def make_wheel(folder: Path) -> None:
    """A package `bay` of one module, as pip wants it."""
    with zipfile.ZipFile(folder / "bay-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("bay.py", "COAT = 'brown'\n")
        about = "bay-1.dist-info/"
        wheel.writestr(about + "METADATA", "Metadata-Version: 2.1\nName: bay\nVersion: 1\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(about + "WHEEL", tags)
        names = ("bay.py", about + "METADATA", about + "WHEEL", about + "RECORD")
        wheel.writestr(about + "RECORD", "".join(f"{name},,\n" for name in names))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A server that was started as the quickstart says: its environment is active."""
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    with home_with_jobs(tmp_path / "home") as folder:
        yield folder


def run_job(folder: Path, **task: object) -> str:
    """What `cavvy run` of a task says, which ends well."""
    (folder / "task.yaml").write_text(json.dumps({"workdir": ".", **task}))
    return call(folder, "run", "task.yaml")


def call(folder: Path, *words: str) -> str:
    command = [f"{sys.prefix}/bin/cavvy", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_a_setup_installs_is_its_jobs_alone(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    make_wheel(folder)
    before = sorted(path.name for path in SERVERS.iterdir())
    uses = ["bay-1-py3-none-any.whl"]
    setup = {"run": f"echo setting-up; {INSTALL}; python -m pip --version", "uses": uses}
    see = "python -c 'import bay, sys; print(bay.COAT, sys.prefix)'; command -v pip"

    said = run_job(folder, name="first", setup=setup, run=see)
    assert "brown " in said
    assert "setting-up" not in said  # a followed setup is one line
    assert "setting-up" in call(folder, "logs", "--setup", "first")
    assert "brown" not in call(folder, "logs", "--setup", "first")
    assert sys.prefix not in said
    again = run_job(folder, name="again", setup=setup, run=see)
    assert "brown " in again
    assert "setting-up" not in call(folder, "logs", "--setup", "again")

    unseen = "! python3 -c 'import bay' 2>/dev/null"
    for task in ({"setup": "true"}, {}):
        run_job(folder, name="other", run=unseen, **task)
    assert sorted(path.name for path in SERVERS.iterdir()) == before
    assert not (SERVERS / "bay.py").exists()


def test_every_way_to_call_pip_installs_into_the_same_place() -> None:
    version = f"python3.{sys.version_info[1]}"
    ways = ("pip", "pip3", "python -m pip", "python3 -m pip")
    setup = "\n".join(f"{way} --version | sed 's/.* from //'" for way in ways)
    with make_rig(setup=setup, run="python -c 'import sys; print(sys.prefix)'") as rig:
        rig.environ["PATH"] = f"{sys.prefix}/bin:{Path(sys.base_prefix, 'bin')}:/usr/bin:/bin"
        assert rig.finish() == 0, rig.said()
        *places, prefix = rig.output().split("\n")[:-1]
        assert len(places) == 4
        assert all(place.startswith(prefix + "/lib") for place in places)
        assert prefix.startswith(str(rig.folder / "cache" / "setups"))
        assert Path(prefix, "bin", version).exists()


def test_uv_makes_the_environment_on_a_node_that_has_it(tmp_path: Path) -> None:
    tools = tmp_path / ".local" / "bin"
    tools.mkdir(parents=True)
    uv = tools / "uv"
    uv.write_text(
        '#!/bin/sh\n[ "$1 $4" = "venv --python" ] || exit 2\n'
        'exec "$5" -m venv --without-pip --prompt by-uv "$6"\n'
    )
    uv.chmod(0o755)
    see = "pip --version; cat $VIRTUAL_ENV/pyvenv.cfg"
    with make_rig(setup="true", run=see) as rig:
        rig.environ.update(PATH="/usr/bin:/bin", HOME=str(tmp_path))
        assert rig.finish() == 0, rig.said()
        assert "by-uv" in rig.output()
        assert rig.output().startswith("pip ")
        [kept] = (rig.folder / "cache" / "setups").iterdir()
        assert kept.name.endswith(f"@{os.uname().nodename}")  # hosts may share the cache


def test_the_log_says_where_the_output_of_the_setup_ends() -> None:
    with make_rig(run="echo work", setup="echo setup") as rig:
        assert rig.finish() == 0
        assert rig.output() == "setup\nwork\n"
        assert rig.stub.last("running")["log_bytes"] == len("setup\n")


def test_an_image_keeps_its_own_python() -> None:
    with make_rig(setup='echo "$PATH" "${VIRTUAL_ENV-none}"', run='echo "$PATH"') as rig:
        rig.config["boxed"] = True
        assert rig.finish() == 0, rig.said()
        assert rig.output() == f"{rig.environ['PATH']} none\n{rig.environ['PATH']}\n"


def test_what_conda_installed_stays_visible_and_untouched(tmp_path: Path) -> None:
    conda = tmp_path / "conda"
    (conda / "bin").mkdir(parents=True)
    (conda / "conda-meta").mkdir()
    shutil.copy(os.path.realpath(sys.executable), conda / "bin" / "python3")
    packages = conda / "lib" / f"python3.{sys.version_info[1]}"
    shutil.copytree(
        Path(sysconfig.get_path("stdlib")),
        packages,
        ignore=shutil.ignore_patterns("site-packages", "test", "idlelib", "__pycache__"),
    )
    (packages / "site-packages").mkdir()
    (packages / "site-packages" / "hay.py").write_text("HERE = True\n")
    work = tmp_path / "work"
    work.mkdir()
    make_wheel(work)
    with make_rig(run="python3 -c 'import bay, hay; print(bay.__file__, hay.__file__)'") as rig:
        wheel = "bay-1-py3-none-any.whl"
        snapshot = rig.stub.add_folder({wheel: (work / wheel).read_bytes()})
        rig.stub.work.update(workdir={"snapshot": snapshot}, setup=INSTALL)
        libraries = sysconfig.get_config_var("LIBDIR")
        rig.environ.update(PATH=f"{conda}/bin:/usr/bin:/bin", LD_LIBRARY_PATH=str(libraries))
        assert rig.finish() == 0, rig.said() + rig.output()
        bay, hay = rig.output().split()
        assert bay.startswith(str(rig.folder / "cache"))
        assert hay.startswith(str(conda))
    assert sorted(path.name for path in (packages / "site-packages").iterdir())[-1] == "hay.py"


def test_a_node_without_pip_says_so_when_a_setup_wants_it(tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    python = bare / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    maker = tmp_path / "agent"
    shutil.copytree(HERE, maker)
    with make_rig(setup="echo fine", run="pip --version") as rig:
        rig.environ["PATH"] = f"{bare}:/usr/bin:/bin"
        (maker / "work" / "make_venv.py").write_text("raise SystemExit(1)\n")
        rig.command = [sys.executable, "-I", "-S", str(maker / "__main__.py")]
        assert rig.finish() == 0, rig.said()
        assert rig.exited()["exit_code"] == 1
        assert "this node has no pip" in rig.output()
