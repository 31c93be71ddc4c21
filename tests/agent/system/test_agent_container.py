"""Work in containers, on the engine that is here; skipped where there is none that works."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.agent_server import GANG, Rig, make_rig
from tests.system.engines import engine_with
from tests.waits import PATIENCE_S

pytestmark = pytest.mark.system
IMAGE = "localhost/cavvy-agent-test:1"
TOOLS = ("sh", "cat", "echo", "sleep", "kill", "env", "ls", "touch", "mkdir", "true", "sed")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine with a small image, made of the host's busybox."""
    with engine_with(IMAGE, TOOLS, tmp_path_factory.mktemp("image")) as found:
        yield found


def prepare(rig: Rig) -> None:
    rig.stub.work["image"] = IMAGE
    rig.environ.update({name: os.environ[name] for name in ("DOCKER_HOST",) if name in os.environ})


def containers(engine: str) -> str:
    """Those of this process' agents."""
    command = [engine, "ps", "-a", "--filter", f"name={GANG}", "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_work_runs_in_the_image_with_its_environment_and_folder(engine: str) -> None:
    run = "cat file; ls /; echo $A $TOKEN $CAVVY_RANK; echo out >result; exit 9"
    with make_rig(run=run, env={"A": "b"}, secrets={"TOKEN": "swordfish"}) as rig:
        prepare(rig)
        rig.stub.work["workdir"] = {"snapshot": rig.stub.add_folder({"file": b"content\n"})}
        assert rig.finish() == 0
        assert "content\nbin\n" in rig.output()
        assert rig.output().endswith("b *** 0\n")
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("exit", 9)
        assert (rig.home / "work" / "result").read_text() == "out\n"
        assert rig.stub.last("event")["name"] == "image"
        assert "sha256:" in str(rig.stub.last("event")["text"])
        assert containers(engine) == ""


def test_setup_and_run_share_the_container(engine: str) -> None:
    with make_rig(run="cat /made", setup="echo in the image >/made", setup_key="k") as rig:
        prepare(rig)
        assert rig.finish() == 0
        assert rig.output().endswith("in the image\n")
        assert rig.stub.kinds()[-2:] == ["running", "exited"]
    with make_rig(run="echo never", setup="exit 3", setup_key="k") as rig:
        prepare(rig)
        assert rig.finish() == 0
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("setup", 3)


def test_stop_reaches_the_commands_in_the_container(engine: str) -> None:
    with make_rig(
        run="sh -c 'trap \"echo saved; exit 5\" TERM; echo up; while :; do sleep 0.1; done'"
    ) as rig:
        prepare(rig)
        agent = rig.launch()
        rig.until(lambda: rig.output().endswith("up\n"))
        rig.stub.run_beside("e", ["cat", "/proc/1/cmdline"])
        rig.until(lambda: "e" in rig.stub.exec_codes)
        assert b"entry.sh" in rig.stub.exec_output["e"]
        rig.stub.give("stop", 20)
        assert agent.wait(PATIENCE_S) == 0
        assert "saved" in rig.output()
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("stopped", 5)


def test_killed_agent_leaves_no_container(engine: str) -> None:
    with make_rig(run="trap '' TERM; echo up; while :; do sleep 0.1; done") as rig:
        prepare(rig)
        agent = rig.launch()
        rig.until(lambda: rig.output().endswith("up\n"))
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        rig.until(lambda: containers(engine) == "")


def test_image_that_cannot_be_had_is_told(engine: str) -> None:
    with make_rig(run="true") as rig:
        prepare(rig)
        rig.stub.work["image"] = "localhost/no-such-image:1"
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "setup"
        assert (
            rig.exited()["reason"]
            == "the image localhost/no-such-image:1 could not be pulled; the engine's reason is in "
            "the log"
        )


def test_node_without_an_engine_refuses(tmp_path: Path) -> None:
    with make_rig(run="true", image="python:3.12") as rig:
        for program in ("bash", "sh"):
            (tmp_path / program).symlink_to(f"/bin/{program}")
        rig.environ["PATH"] = str(tmp_path)
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "setup"
        assert "needs podman, docker or Apptainer; install one of them on this node" in str(
            rig.exited()["reason"]
        )


def test_the_image_runs_its_own_command(engine: str, tmp_path: Path) -> None:
    image = "localhost/cavvy-agent-test:own"
    (tmp_path / "Dockerfile").write_text(
        f'FROM {IMAGE}\nWORKDIR /bin\nENTRYPOINT ["sh", "-c"]\nCMD ["pwd; exit 5"]\n'
    )
    build = [engine, "build", "--network", "host", "--tag", image, str(tmp_path)]
    subprocess.run(build, check=True, capture_output=True, timeout=PATIENCE_S)
    with make_rig(run="exec ${{ image.command }}") as rig:
        prepare(rig)
        rig.stub.work["image"] = image
        assert rig.finish() == 0
        assert rig.output().endswith("/bin\n")
        assert rig.exited()["exit_code"] == 5
    with make_rig(run="exec ${{ image.command }}") as rig:
        prepare(rig)
        assert rig.finish() == 0
        assert "names no command" in str(rig.exited())
