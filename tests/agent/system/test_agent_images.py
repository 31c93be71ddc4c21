"""Images that are built, refused for their CUDA, or run by Apptainer; engines are real where
they are said to be.
"""

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.agent_server import Rig, make_rig
from tests.system.engines import engine_with, remove_images
from tests.waits import PATIENCE_S

pytestmark = pytest.mark.system
BASE = "localhost/cavvy-images-test:1"
BUILT = "localhost/cavvy-build:0123456789abcdef"
TOOLS = ("sh", "cat", "echo", "sleep", "kill", "env", "ls", "mkdir", "true")
DOCKERFILE = f"""\
FROM {BASE} AS small
ARG WORD=none
COPY file /made
RUN echo $WORD >>/made
ENV CUDA_VERSION=12.4.1
FROM small
RUN echo last >>/made
"""
# What a strict Apptainer takes here: it refuses everything else, and shows the work only what it
# was given.
APPTAINER = """\
#!/bin/bash
set -eu
case "$1" in
pull)
    [ "$2" = --force ]; [ "$4" = docker://registry.example/team/image:1 ]
    [ "${APPTAINER_DOCKER_USERNAME:-}:${APPTAINER_DOCKER_PASSWORD:-}" = ann:opensesame ]
    echo "pulled once" >>"$(dirname "$0")/pulls"; echo sif >"$3" ;;
inspect)
    if [ "$2" = --environment ]; then echo "export CUDA_VERSION=\\"\\${CUDA_VERSION:-\\"11.8.0\\"}\\""
    else echo '{"data": {"attributes": {"labels": {}}}}'; fi ;;
exec)
    shift; keep=()
    for each in $(compgen -e); do
        case $each in APPTAINERENV_*) keep+=("${each#APPTAINERENV_}=${!each}") ;; esac
    done
    while :; do case "$1" in
        --cleanenv | --no-home | --writable-tmpfs | --nv) shift ;;
        --pwd) cd "$2"; shift 2 ;;
        --bind) [ -d "${2%%:*}" ]; shift 2 ;;
        --*) exit 99 ;;
        *) break ;;
    esac; done
    [ "$(cat "$1")" = sif ]; shift
    exec env -i PATH=/usr/bin:/bin "${keep[@]}" "$@" ;;
*) exit 98 ;;
esac
"""


# A stand-in of docker, which gives the work only the variables that it is told to pass. `seen` has
# its own.
DOCKER = """\
#!/bin/bash
env >>"$(dirname "$0")/seen"
keep=()
while [ $# -gt 0 ]; do case "$1" in
    run | exec) work=1; shift ;;
    --env) keep+=("$2=${!2}"); shift 2 ;;
    --rm) shift ;;
    sh) exec env -i PATH=/usr/bin:/bin "${keep[@]}" "$@" ;;
    --workdir | --name | --network | --ipc | --entrypoint | --user | --volume | --ulimit | --memory) shift 2 ;;
    *) [ "$work" ] || exit 0; shift ;;
esac; done
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real engine, with a small image made of the host's busybox."""
    with engine_with(BASE, TOOLS, tmp_path_factory.mktemp("image")) as found:
        remove_images(found, BUILT)
        yield found
        remove_images(found, BUILT)


def prepare(rig: Rig, text: str, **build: object) -> None:
    rig.stub.work["image"] = BUILT
    rig.stub.work["build"] = {"path": "docker", "dockerfile": "Dockerfile", **build}
    snapshot = rig.stub.add_folder(
        {"docker/Dockerfile": text.encode(), "docker/file": b"content\n"}
    )
    rig.stub.work["workdir"] = {"snapshot": snapshot}
    rig.environ.update({name: os.environ[name] for name in ("DOCKER_HOST",) if name in os.environ})


def test_a_dockerfile_of_the_working_folder_is_built_once(engine: str) -> None:
    with make_rig(run="cat /made docker/file") as rig:
        prepare(rig, DOCKERFILE, args={"WORD": "given"})
        assert rig.finish() == 0
        assert rig.output().endswith("content\ngiven\nlast\ncontent\n"), rig.output()
        assert str(rig.stub.last("event")["text"]).startswith(BUILT)
    with make_rig(run="cat /made") as rig:  # the name is of the content: what is there is used
        prepare(rig, "FROM nowhere.invalid/none\n")
        assert rig.finish() == 0
        assert rig.output().endswith("content\ngiven\nlast\n")


def test_a_build_that_fails_is_told(engine: str) -> None:
    remove_images(engine, BUILT)
    with make_rig(run="echo never") as rig:
        prepare(rig, f"FROM {BASE}\nRUN echo oh no; exit 7\n")
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "setup"
        assert "could not be built" in str(rig.exited()["reason"])
        assert "oh no" in rig.output()
    with make_rig(run="echo never") as rig:
        prepare(rig, DOCKERFILE, dockerfile="none/Dockerfile")
        assert rig.finish() == 0
        assert "there is no none/Dockerfile in docker" in str(rig.exited()["reason"])


def test_a_driver_that_is_too_old_is_refused_before_the_work(engine: str, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 470.82.01\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    remove_images(engine, BUILT)
    with make_rig(run="echo never") as rig:
        prepare(rig, DOCKERFILE, target="small")
        del rig.config["devices"]  # all of the node's
        rig.environ["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        assert rig.finish() == 0
        reason = str(rig.exited()["reason"])
        assert "the image needs CUDA 12.4, which needs NVIDIA driver 525.60.13 or newer" in reason
        assert "this node has 470.82.01" in reason
        assert "never" not in rig.output()


@pytest.fixture
def apptainer(tmp_path: Path) -> str:
    return place_engine(tmp_path, "apptainer", APPTAINER)


def place_engine(folder: Path, name: str, text: str) -> str:
    """A PATH on which a strict stand-in is the only engine."""
    tools = folder / "bin"
    tools.mkdir()
    for tool in ("bash", "sh", "env", "cat", "dirname", "sleep", "grep"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    (tools / name).write_text(text)
    (tools / name).chmod(0o755)
    return str(tools)


@pytest.mark.parametrize(("name", "text"), [("docker", DOCKER), ("apptainer", APPTAINER)])
def test_variables_of_the_task_change_nothing_of_the_engine(
    name: str, text: str, tmp_path: Path
) -> None:
    tools = place_engine(tmp_path, name, text.replace("set -eu", 'env >>"$(dirname "$0")/seen"'))
    given = {"DOCKER_CONFIG": "work", "APPTAINER_BIND": "/etc", "PATH": "work:/bin", "A": "b\nc"}
    run = 'echo $DOCKER_CONFIG $APPTAINER_BIND $DOCKER_HOST "$A"; env | grep -c GIVEN || true'
    with make_rig(run=run, env=given) as rig:
        rig.stub.work["image"] = "registry.example/team/image:1"
        rig.stub.work["image_login"] = "ann:opensesame"
        rig.stub.work["secrets"] = {"DOCKER_HOST": "unix:///evil"}
        rig.environ["PATH"] = tools
        assert rig.finish() == 0
        assert rig.output().endswith("work /etc *** b\nc\n0\n"), rig.output()
        if name == "docker":  # whose `exec` has the variables with which the container started
            later = ["/bin/sh", str(rig.home / "enter.sh"), "/usr/bin/env"]
            passed = {f"CAVVY_GIVEN_{each}": value for each, value in given.items()}
            shown = subprocess.run(later, env=passed, capture_output=True, text=True).stdout
            assert "DOCKER_CONFIG=work" in shown
            assert "GIVEN_DOCKER" not in shown
    seen = dict.fromkeys((tmp_path / "bin/seen").read_text().splitlines())
    names = ("DOCKER_CONFIG=", "APPTAINER_BIND=", "DOCKER_HOST=", "PATH=", "A=")
    assert [each for each in seen if each.startswith(names)] == [f"PATH={tools}"]


def test_apptainer_runs_the_work(apptainer: str) -> None:
    for _ in range(2):
        run = "echo $A $CAVVY_RANK; env | grep -c 'open[s]esame' || true; exit 4"
        with make_rig(run=run, env={"A": "b c"}) as rig:
            rig.stub.work["image"] = "registry.example/team/image:1"
            rig.stub.work["image_login"] = "ann:opensesame"
            rig.environ["PATH"] = apptainer
            assert rig.finish() == 0
            assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("exit", 4), rig.exited()
            assert rig.output().endswith("b c 0\n0\n")
            assert b"opensesame" not in b"".join(
                path.read_bytes()
                for path in rig.home.rglob("*")
                if path.is_file() and path.name != "config.json"
            )


def test_apptainer_s_work_alone_gets_the_signal_of_a_stop(apptainer: str) -> None:
    work = 'trap "echo saved; exit 0" TERM; echo ready; while :; do sleep 0.1; done'
    run = f"sh -c '{work}' & wait; wait"
    with make_rig(run=f"trap : TERM; {run}") as rig:
        rig.stub.work["image"] = "registry.example/team/image:1"
        rig.stub.work["image_login"] = "ann:opensesame"
        rig.environ["PATH"] = apptainer
        agent = rig.launch()
        rig.until(lambda: "ready" in rig.output())
        # There is no namespace of processes, so `kill -1` would reach all processes of the user.
        entry = (rig.home / "entry.sh").read_text()
        if " -1" in entry:
            agent.kill()  # the end of this test must not reach them; the work gets SIGKILL
        assert " -1" not in entry
        rig.stub.give("stop", 5)
        assert agent.wait(PATIENCE_S) == 0
        assert rig.output().endswith("saved\n")


def test_apptainer_builds_nothing(apptainer: str) -> None:
    with make_rig(run="echo never") as rig:
        prepare(rig, DOCKERFILE)
        rig.environ["PATH"] = apptainer
        assert rig.finish() == 0
        assert "Apptainer cannot build Dockerfiles" in str(rig.exited()["reason"])
