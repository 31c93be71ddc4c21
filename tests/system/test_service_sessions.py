"""`cavvy dev` on a managed service: the session is a job of the service, and Jupyter in its container
is reached through the agent.
"""

import re
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.contract import vm_cloud
from tests.contract.sagemaker_stand_in import ROLE
from tests.contract.test_provider_sagemaker import TRAITS
from tests.system.containers import ContainerCloud
from tests.system.test_managed_jobs import IMAGE, SageMakerContainers, service_user
from tests.system.trust import User
from tests.waits import PATIENCE_S

pytestmark = pytest.mark.system
# the three calls that `cavvy dev` and its session make of Jupyter
JUPYTER = """#!/bin/sh
case "$*" in
"lab --version") echo 4.4.0 ;;
"server list --json") cat "$JUPYTER_FOLDER/server" ;;
*)
    mkdir -p "$JUPYTER_FOLDER"
    echo '{"port": '"$MASTER_PORT"', "token": "secret"}' > "$JUPYTER_FOLDER/server"
    echo "a notebook of the container" > "$JUPYTER_FOLDER/lab"
    exec python3 -m http.server --bind 127.0.0.1 --directory "$JUPYTER_FOLDER" "$MASTER_PORT" ;;
esac
"""


@pytest.fixture
def sagemaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SageMakerContainers]:
    """A SageMaker whose containers have Jupyter."""
    monkeypatch.setattr(vm_cloud, "BOOT", timedelta(seconds=1))
    program = tmp_path / "bin/jupyter"
    program.parent.mkdir()
    program.write_text(JUPYTER.replace("$JUPYTER_FOLDER", f"{tmp_path}/jupyter"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    cloud = ContainerCloud(TRAITS, tmp_path / "containers")
    yield SageMakerContainers(cloud)
    cloud.close()


@pytest.fixture
def user(sagemaker: SageMakerContainers, tmp_path: Path) -> Iterator[User]:
    table = f"role = '{ROLE}'\nbucket = 's3://bucket/cavvy'\nimage = '{IMAGE}'\n"
    with service_user(sagemaker, "sagemaker", table, tmp_path / "user") as user:
        yield user


def test_jupyter_of_a_training_job_opens_here(sagemaker: SageMakerContainers, user: User) -> None:
    task = user.task("resources: {gpu: T4}\nrun: 'true'\n")
    user.cli("dev", task, "--ide", "jupyter", "--no-open", "--yes")
    (body,) = sagemaker.bodies.values()
    assert body["ResourceConfig"]["InstanceType"] == "ml.g4dn.xlarge"
    command = user.start("dev", task, "--ide", "jupyter", "--yes")
    try:
        assert command.stdout is not None
        address = command.stdout.readline().strip()
        assert re.fullmatch(r"http://127.0.0.1:\d+/lab\?token=secret", address), (
            address,
            sagemaker.cloud.logs(),
        )
        with urlopen(address, timeout=PATIENCE_S) as reply:
            assert reply.read() == b"a notebook of the container\n"
    finally:
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=PATIENCE_S)
    assert len(sagemaker.bodies) == 1
    user.cli("machines", "stop", "dev", "--yes")
    user.ended("dev")
    assert sagemaker.cloud.billed() == []
