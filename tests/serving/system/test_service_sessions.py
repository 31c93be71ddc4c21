"""`cavvy dev` on managed services. On most, the session is a job of the service; on a provider of
managed notebooks, it is a notebook of the service. Jupyter is reached through the agent.
"""

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from tests.contract.azureml_notebooks_stand_in import ComputeInstancesStandIn
from tests.contract.sagemaker_notebooks_stand_in import NotebooksStandIn
from tests.contract.sagemaker_stand_in import ROLE
from tests.contract.workbench_stand_in import WorkbenchStandIn
from tests.providers.aws.contract.test_provider_sagemaker import TRAITS
from tests.providers.aws.contract.test_provider_sagemaker_notebooks import (
    TRAITS as SAGEMAKER_NOTEBOOK_TRAITS,
)
from tests.providers.azure.contract.test_provider_azureml_notebooks import TRAITS as NOTEBOOK_TRAITS
from tests.providers.gcp.contract.test_provider_vertex_workbench import TRAITS as WORKBENCH_TRAITS
from tests.providers.seam.system.test_managed_jobs import (
    IMAGE,
    SageMakerContainers,
    azureml_user,
    managed_user,
    service_user,
    vertex_user,
)
from tests.system.containers import ContainerCloud
from tests.system.trust import User, user_at
from tests.waits import PATIENCE_S, wait_until

from cavvy.providers.contract import memory_cloud
from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.vm.cloud import MachineState

pytestmark = pytest.mark.system
# the three calls that `cavvy dev` and its session make of Jupyter, which lists a server that listens
JUPYTER = """#!/bin/sh
case "$*" in
"lab --version") echo 4.4.0 ;;
"server list --json") cat "$JUPYTER_FOLDER/server" ;;
*)
    mkdir -p "$JUPYTER_FOLDER"
    cd "$JUPYTER_FOLDER"
    echo "a notebook of the container" > lab
    exec python3 -c 'import http.server, json, os
port = int(os.environ["MASTER_PORT"])
serve = http.server.SimpleHTTPRequestHandler
with http.server.ThreadingHTTPServer(("127.0.0.1", port), serve) as server:
    with open("server", "w") as file:
        json.dump({"port": port, "token": "secret"}, file)
    server.serve_forever()' ;;
esac
"""


class NotebookCloud(ContainerCloud):
    """Notebooks are billed until they are deleted, also after their work has ended."""

    def _notice_ends(self) -> None:
        return


class RunningNotebooks(ComputeInstancesStandIn):
    """Compute instances whose scripts run. One that is deleted is listed as such, as by Azure, whose
    deletions take minutes: one that was never listed could only be one that is not listed yet.
    """

    cloud: ContainerCloud
    states = {**ComputeInstancesStandIn.states, MachineState.ENDED: "Deleting"}  # noqa: RUF012

    def end(self, machine: str) -> None:
        super().end(machine)
        last = {"operationName": "Delete", "operationTime": self.cloud.time.isoformat()}
        self.changes[machine] = {"lastOperation": last}

    def start_notebook(self, body: dict[str, Any], script: str) -> str:
        machine = super().start_notebook(body, script)
        run_script(self.cloud, machine, script)
        return machine


class RunningNotebookInstances(NotebooksStandIn):
    """Notebook instances of SageMaker whose scripts run, until they are stopped."""

    cloud: ContainerCloud

    def start_notebook(self, region: str, name: str) -> list[Rented]:
        made = super().start_notebook(region, name)
        run_script(self.cloud, made[-1].id, self.script_of(region, name))
        return made

    def end_scripts(self, machine: str) -> None:
        threading.Thread(target=self.cloud.stop, args=(machine,), daemon=True).start()


class RunningWorkbench(WorkbenchStandIn):
    """Workbench instances whose scripts run."""

    cloud: ContainerCloud

    def start_notebook(self, name: str, body: dict[str, Any]) -> str:
        machine = super().start_notebook(name, body)
        run_script(self.cloud, machine, self.script_of(name))
        return machine


def run_script(cloud: ContainerCloud, machine: str, script: str) -> None:
    """Run a script that leaves the agent in the background, until the machine is deleted."""
    trap = "trap 'kill -- -$!' TERM"  # the script leaves a process group
    cloud.run(machine, ["/bin/sh", "-c", f"{trap}\n{script}\nwait\nwait"], {})


@contextmanager
def notebooks_user(cloud: ContainerCloud, root: Path) -> Iterator[tuple[User, RunningNotebooks]]:
    """A user of compute instances, on a machine with a managed identity; nothing of theirs is
    left.
    """
    server = RestServer()
    api = RunningNotebooks(cloud, server)
    table = "".join(f"{name} = '{value}'\n" for name, value in api.settings.items())
    table += f"endpoint = '{api.url}'\n"
    with managed_user(api.cloud, "azureml-notebooks", table, root) as user:
        user.variables = {
            "IDENTITY_ENDPOINT": f"{api.url}/identity",
            "IDENTITY_HEADER": "the-identity",
        }
        yield user, api
    assert api.bugs == []
    server.close()


@pytest.fixture
def jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers and notebooks that start quickly and have Jupyter."""
    monkeypatch.setattr(memory_cloud, "BOOT", timedelta(0))
    folder = tmp_path / "bin"
    folder.mkdir()
    jupyter = JUPYTER.replace("$JUPYTER_FOLDER", f"{tmp_path}/jupyter")
    # notebooks of Google turn themselves off once their agent has ended, but not this machine
    for name, text in (("jupyter", jupyter), ("poweroff", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.fixture
def cloud(jupyter: None, tmp_path: Path) -> Iterator[ContainerCloud]:
    cloud = ContainerCloud(TRAITS, tmp_path / "containers")
    yield cloud
    cloud.close()


@pytest.fixture
def notebooks(
    jupyter: None, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[NotebookCloud]:
    """A cloud with the traits of Azure's notebooks, or those of the test's parameter."""
    traits = getattr(request, "param", NOTEBOOK_TRAITS)
    cloud = NotebookCloud(traits, tmp_path / "containers")
    yield cloud
    cloud.close()


def test_jupyter_of_a_training_job_opens_here(cloud: ContainerCloud, tmp_path: Path) -> None:
    sagemaker = SageMakerContainers(cloud)
    table = f"role = '{ROLE}'\nbucket = 's3://bucket/cavvy'\nimage = '{IMAGE}'\n"
    with service_user(sagemaker, "sagemaker", table, tmp_path / "user") as user:
        open_jupyter(user, cloud)
        (body,) = sagemaker.bodies.values()
        assert body["ResourceConfig"]["InstanceType"] == "ml.g4dn.xlarge"


def test_jupyter_of_a_custom_job_opens_here(cloud: ContainerCloud, tmp_path: Path) -> None:
    with vertex_user(cloud, tmp_path) as (user, vertex):
        open_jupyter(user, cloud)
        assert len(vertex.jobs) == 1


def test_jupyter_of_a_command_job_opens_here(cloud: ContainerCloud, tmp_path: Path) -> None:
    with azureml_user(cloud, tmp_path) as (user, azureml):
        open_jupyter(user, cloud)
        assert len(azureml.jobs) == 1


def test_jupyter_of_a_compute_instance_opens_here(notebooks: NotebookCloud, tmp_path: Path) -> None:
    """The notebook is on the bill, a task that is no session is refused, and a session that is
    stopped ends with its notebook.
    """
    with notebooks_user(notebooks, tmp_path) as (user, azure):
        refused = user.cli("run", "-d", "--yes", user.task("run: 'true'\n"), code=None)
        assert "run only interactive sessions" in f"{refused}", refused
        open_jupyter(user, notebooks)
        (body,) = azure.bodies.values()
        assert body["properties"]["computeType"] == "ComputeInstance"


@pytest.mark.parametrize("notebooks", [SAGEMAKER_NOTEBOOK_TRAITS], indirect=True)
def test_jupyter_of_a_notebook_instance_opens_here(
    notebooks: NotebookCloud, tmp_path: Path
) -> None:
    """The notebook is stopped and deleted with its session."""
    sagemaker = RunningNotebookInstances(notebooks)
    table = f"role = '{ROLE}'\n"
    with service_user(sagemaker, "sagemaker-notebooks", table, tmp_path / "user") as user:
        open_jupyter(user, notebooks)
        (body,) = sagemaker.bodies.values()
        assert body["InstanceType"] == "ml.g4dn.xlarge"


@pytest.mark.parametrize("notebooks", [WORKBENCH_TRAITS], indirect=True)
def test_jupyter_of_a_workbench_instance_opens_here(
    notebooks: NotebookCloud, tmp_path: Path
) -> None:
    server = RestServer()
    google = RunningWorkbench(notebooks, server)
    (tmp_path / "key.json").write_text(google.make_key_file())
    places = {**google.settings, "endpoint": google.url, "key_file": tmp_path / "key.json"}
    table = "".join(f"{name} = '{value}'\n" for name, value in places.items())
    with managed_user(notebooks, "vertex-workbench", table, tmp_path / "user") as user:
        open_jupyter(user, notebooks)
    (body,) = google.bodies.values()
    (gpus,) = body["gceSetup"]["acceleratorConfigs"]
    assert gpus == {"type": "NVIDIA_TESLA_T4", "coreCount": "1"}
    assert google.bugs == []
    server.close()


def test_jupyter_is_added_to_a_session_that_has_none(jupyter: None, tmp_path: Path) -> None:
    """A second request finds the Jupyter that runs, and servers of other folders do not count."""
    with user_at(tmp_path / "user") as user:
        user.cli("dev", "--no-open")
        other = tmp_path / "jupyter" / "server"
        other.parent.mkdir()
        other.write_text('{"port": 1, "token": "other", "root_dir": "/elsewhere"}\n')
        told = []
        for _ in range(2):
            command = user.start("dev", "--ide", "jupyter")
            assert command.stdout is not None
            address = command.stdout.readline().strip()
            assert re.fullmatch(r"http://127.0.0.1:\d+/lab\?token=secret", address), address
            command.send_signal(signal.SIGINT)
            told.append(command.communicate(timeout=PATIENCE_S)[1])
        assert ["has no Jupyter yet" in each for each in told] == [True, False]
        user.cli("machines", "stop", "dev", "--yes")


def open_jupyter(user: User, cloud: ContainerCloud) -> None:
    """Start a session, connect to it again, open its Jupyter, and end it."""
    task = user.task("resources: {gpu: T4}\nrun: 'true'\n")
    user.cli("dev", task, "--ide", "jupyter", "--no-open", "--yes")
    assert len(cloud.billed()) == 1
    command = user.start("dev", task, "--ide", "jupyter", "--yes")
    try:
        assert command.stdout is not None
        address = command.stdout.readline().strip()
        assert re.fullmatch(r"http://127.0.0.1:\d+/lab\?token=secret", address), (
            address,
            cloud.logs(),
        )
        with urlopen(address, timeout=PATIENCE_S) as reply:
            assert reply.read() == b"a notebook of the container\n"
    finally:
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=PATIENCE_S)
    assert len(cloud.billed()) == 1
    user.cli("machines", "stop", "dev", "--yes")
    job = user.ended("dev")
    wait_until(lambda: cloud.billed() == [], cloud.logs)  # some services need several steps
    assert user.json("cost", job.id)["total_micros"] > 0
