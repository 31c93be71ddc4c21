"""`cavvy serve` on managed endpoints: the stand-in runs each endpoint's container as a process."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from tests.contract.azure_public import identity_variables
from tests.contract.azureml_endpoints_stand_in import AzureMlEndpointsStandIn
from tests.contract.sagemaker_endpoints_stand_in import EndpointsStandIn
from tests.contract.sagemaker_stand_in import IMAGE, ROLE
from tests.contract.vertex_endpoints_stand_in import VertexEndpointsStandIn
from tests.providers.aws.contract.test_provider_sagemaker_endpoints import TRAITS
from tests.providers.azure.contract.test_provider_azureml_endpoints import IMAGE as AZURE_IMAGE
from tests.providers.gcp.contract.test_provider_vertex_endpoints import IMAGE as VERTEX_IMAGE
from tests.providers.seam.system.test_managed_jobs import free_port, managed_user, service_user
from tests.serving.system.test_serve_haproxy import need_haproxy
from tests.system.containers import ContainerCloud
from tests.system.trust import User, environment
from tests.waits import START_S, wait_until

from cavvy.capabilities.serving.gateway.haproxy.runtime import HaproxyRuntime
from cavvy.capabilities.serving.wire import find_service
from cavvy.client.service_wire import ReplicaView
from cavvy.providers.contract import memory_cloud
from cavvy.providers.contract.rest_stand_in import RestServer

pytestmark = pytest.mark.system
NUMBERS = b'{"numbers": [1, 2, 3]}'
PROGRAM = Path(__file__).parents[2].joinpath("system", "endpoint_container.py")
TASK = """
name: {name}
run: serve
env: {env}
resources: {{providers: [{provider}]}}
service:
  port: 8080
  probe: {{path: /ping, every: 1s, timeout: 1s}}
  replicas: {{min: 0, max: 1}}
  hosts: {hosts}
"""


class EndpointCloud(ContainerCloud):
    """Endpoints are billed until they are deleted, also if their container has ended."""

    def _notice_ends(self) -> None:
        return


class Containers:
    """The processes of endpoints, by the endpoint's name. An endpoint is in service once its
    container answers /ping, and has failed if the container ends before that.
    """

    def __init__(self, cloud: ContainerCloud, failures: dict[str, str]) -> None:
        self._cloud, self._failures = cloud, failures
        self._ports: dict[str, int] = {}
        self._ids: dict[str, str] = {}
        self._given: dict[str, Mapping[str, str]] = {}
        self._up: set[str] = set()

    def start(self, name: str, machine: str, environment: Mapping[str, str]) -> None:
        self._ids[name], self._ports[name] = machine, free_port()
        self._given[name] = {**environment, "MAPPED_PORT": str(self._ports[name])}
        self._run(name)

    def start_again(self, name: str) -> None:
        """Start another container in place of one that has ended, as the clouds do."""
        self._ids[name] += "-again"
        self._run(name)
        wait_until(lambda: self._answers(name), self._cloud.logs)

    def _run(self, name: str) -> None:
        command = [sys.executable, str(PROGRAM), "serve"]
        self._cloud.run(self._ids[name], command, self._given[name])

    def is_up(self, name: str) -> bool:
        if name in self._up:
            return True
        if self._cloud.exit_code(self._ids[name]) is not None:
            self._failures[name] = "The primary container did not pass the ping health check."
            return False
        if not self._answers(name):
            return False
        self._up.add(name)
        return True

    def _answers(self, name: str) -> bool:
        try:
            urlopen(f"http://127.0.0.1:{self._ports[name]}/ping", timeout=START_S).close()
        except OSError:
            return False
        return True

    def answer(self, name: str, body: bytes) -> tuple[int, bytes]:
        return post(f"http://127.0.0.1:{self._ports[name]}/invocations", body)

    def names(self) -> list[str]:
        """The endpoints whose containers run."""
        return [name for name, id in self._ids.items() if self._cloud.exit_code(id) is None]

    def end(self, name: str) -> None:
        if name in self._ids:  # else the endpoint never got a container
            self._cloud.stop(self._ids[name])


class RunsContainers:
    """The part that the stand-ins have in common."""

    containers: Containers

    def is_up(self, name: str) -> bool:
        return self.containers.is_up(name)

    def answer_call(self, name: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        return self.containers.answer(name, body)

    def end_container(self, name: str) -> None:
        self.containers.end(name)


class RunningEndpoints(RunsContainers, EndpointsStandIn):
    """Endpoints of SageMaker whose containers run."""

    cloud: ContainerCloud
    deletes = timedelta(0)
    place = "sagemaker-endpoints/us-east-1/on-demand"

    def __init__(self, cloud: ContainerCloud) -> None:
        super().__init__(cloud)
        self.containers = Containers(cloud, self.failures)

    def start_endpoint(self, region: str, name: str) -> None:
        super().start_endpoint(region, name)
        given = self.models[region, name]["PrimaryContainer"]["Environment"]
        self.containers.start(name, self.machines(region, name)[-1].id, given)

    def left(self) -> object:
        """What is left of models and endpoints, besides the machines."""
        return [*self.models, *self.configs]


class RunningVertexEndpoints(RunsContainers, VertexEndpointsStandIn):
    """Endpoints of Vertex AI whose containers run."""

    cloud: ContainerCloud
    place = "vertex-endpoints/us-central1/on-demand"

    def __init__(self, cloud: ContainerCloud, server: RestServer) -> None:
        super().__init__(cloud, server)
        self.containers = Containers(cloud, self.failures)

    def start_deployment(self, key: tuple[str, str]) -> None:
        super().start_deployment(key)
        container = self.models[key].body["containerSpec"]
        given = {each["name"]: each["value"] for each in container["env"]}
        self.containers.start(key[1], self.machines_of(key)[-1].id, given)

    def left(self) -> object:
        return [*self.models, *self.endpoints]


class RunningAzureMlEndpoints(RunsContainers, AzureMlEndpointsStandIn):
    """Endpoints of Azure ML whose containers run. The image's `CMD` is `serve`. Azure needs a moment
    to make an endpoint and to delete it, and deletes none while it makes the deployment.
    """

    cloud: ContainerCloud
    creates = deletes = timedelta(seconds=1)
    place = "azureml-endpoints/eastus/on-demand"

    def __init__(self, cloud: ContainerCloud, server: RestServer) -> None:
        super().__init__(cloud, server)
        self.containers = Containers(cloud, self.failures)
        self.strict = True

    def start_deployment(self, name: str) -> None:
        super().start_deployment(name)
        deployment = self.endpoints[name].deployment
        assert deployment is not None
        version = deployment["properties"]["environmentId"].rpartition("/")[2]
        assert self.environments[version]["image"] == AZURE_IMAGE
        given = deployment["properties"]["environmentVariables"]
        self.containers.start(name, self.machines_of(name)[-1].id, given)

    def delete_by_hand(self, name: str) -> None:
        self._delete(name)

    def left(self) -> object:
        self._finish_deletions()
        return [*self.endpoints]


Running = RunningEndpoints | RunningVertexEndpoints | RunningAzureMlEndpoints
# a user, and the place of their replicas, with further settings
AsUser = Callable[["EndpointCloud", Path, str], AbstractContextManager[tuple[User, Running]]]


@contextmanager
def sagemaker_user(
    cloud: EndpointCloud, root: Path, more: str = ""
) -> Iterator[tuple[User, Running]]:
    api = RunningEndpoints(cloud)
    table = f"role = '{ROLE}'\nimage = '{IMAGE}'\n{more}"
    with service_user(api, "sagemaker-endpoints", table, root / "user") as user:
        yield user, api


@contextmanager
def vertex_user(cloud: EndpointCloud, root: Path, more: str = "") -> Iterator[tuple[User, Running]]:
    server = RestServer()
    api = RunningVertexEndpoints(cloud, server)
    key = root / "key.json"
    key.write_text(api.make_key_file())
    table = f"key_file = '{key}'\nimage = '{VERTEX_IMAGE}'\nendpoint = '{api.url}'\n{more}"
    with managed_user(cloud, "vertex-endpoints", table, root / "user") as user:
        yield user, api
    assert api.bugs == []
    server.close()


@contextmanager
def azureml_user(
    cloud: EndpointCloud, root: Path, more: str = ""
) -> Iterator[tuple[User, RunningAzureMlEndpoints]]:
    server = RestServer()
    api = RunningAzureMlEndpoints(cloud, server)
    settings = {**api.settings, "image": AZURE_IMAGE, "endpoint": api.url}
    table = "".join(f"{name} = '{value}'\n" for name, value in settings.items())
    with managed_user(cloud, "azureml-endpoints", table + more, root / "user") as user:
        user.variables = identity_variables(api.url)
        yield user, api
    assert api.bugs == []
    server.close()


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndpointCloud]:
    monkeypatch.setattr(memory_cloud, "BOOT", timedelta(0))
    cloud = EndpointCloud(TRAITS, tmp_path / "containers")
    yield cloud
    cloud.close()


def post(url: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    sent = Request(url, data=body, headers={"Content-Type": "application/json", **headers})
    try:
        with urlopen(sent, timeout=START_S) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def serve(user: User, provider: str, name: str, env: str, hosts: str = "[]") -> str:
    text = TASK.format(name=name, env=env, provider=provider, hosts=hosts)
    (user.work / f"{name}.yaml").write_text(text)
    return f"{user.json('serve', '--yes', f'{name}.yaml')['url']}/invocations"


def read_replicas(user: User) -> Sequence[ReplicaView]:
    with environment(user.environ):
        return find_service(user.api, "default", "digits").replicas


def end_and_check_bill(user: User, cloud: EndpointCloud, api: Running) -> None:
    """Nothing is left, and the bill has each machine once."""
    wait_until(lambda: user.json("services") == [])
    wait_until(lambda: [each for each in cloud.billed() if not each.off] == [])
    wait_until(lambda: api.left() == [], lambda: str(api.left()))
    services = user.json("cost", "--by", "service")
    jobs = user.json("ps", "--all")
    spent = sum(each["spent_micros"] for each in services)
    assert spent == sum(each["spent_micros"] for each in jobs) > 0
    log = (user.home / "server.log").read_text()
    assert "pass failed" not in log, log[-3000:]


@pytest.mark.parametrize("as_user", [sagemaker_user, vertex_user, azureml_user])
def test_an_endpoint_serves_outlives_the_server_and_is_deleted(
    cloud: EndpointCloud, tmp_path: Path, as_user: AsUser
) -> None:
    with as_user(cloud, tmp_path, "") as (user, api):
        provider = api.place.partition("/")[0]
        url = serve(user, provider, "digits", "{LEVEL: 7}")
        broken = serve(user, provider, "broken", "{LEVEL: 1, BROKEN: 1}")
        waiting = ThreadPoolExecutor(1)
        waiting.submit(post, broken, NUMBERS)
        with ThreadPoolExecutor(5) as pool:  # they wait for the endpoint
            answers = list(pool.map(lambda _: post(url, NUMBERS), range(5)))
        assert [status for status, _ in answers] == [200] * 5, (answers, cloud.logs())
        told = [json.loads(body) for _, body in answers]
        assert {(each["sum"], each["level"]) for each in told} == {(6, "7")}
        assert post(url, b"{}")[0] == 400  # the container's own status
        assert post(url.replace("invocations", "other"), NUMBERS)[0] == 404
        assert post(url, NUMBERS, Accept="text/event-stream")[0] == 405
        # an answer that the container writes in parts arrives as a whole
        status, body = post(url, json.dumps({"numbers": [1], "parts": 300}).encode())
        assert (status, len(body)) == (200, 300 * 1000)
        [replica] = read_replicas(user)
        assert replica.place == api.place
        assert {"machine", "load"} <= set(replica.start_s)

        user.kill_server()
        user.json("services")  # starts the server again
        status, body = post(url, NUMBERS)
        assert (status, json.loads(body)["process"]) == (200, told[0]["process"])

        wait_until(
            lambda: "ping health check" in str(user.json("services", "show", "broken")),
            lambda: str(user.json("services", "show", "broken")),
        )
        user.cli("unserve", "broken")
        waiting.shutdown()
        user.cli("unserve", "digits")
        end_and_check_bill(user, cloud, api)


def test_an_endpoint_that_a_person_deletes_is_replaced_and_one_of_an_old_revision_drains(
    cloud: EndpointCloud, tmp_path: Path
) -> None:
    with azureml_user(cloud, tmp_path) as (user, api):
        url = serve(user, "azureml-endpoints", "digits", "{LEVEL: 7}")
        first = json.loads(post(url, NUMBERS)[1])["process"]
        [gone] = api.containers.names()
        api.delete_by_hand(gone)
        # a request with this key may be repeated, so it waits for the other endpoint
        status, body = post(url, NUMBERS, **{"Idempotency-Key": "1"})
        assert (status, json.loads(body)["process"] != first) == (200, True), cloud.logs()
        assert len(cloud.machines) == 2

        go, got = tmp_path / "go", tmp_path / "got"
        held = json.dumps({"numbers": [5], "got": str(got), "go": str(go)}).encode()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, url, held)
            wait_until(got.exists)
            serve(user, "azureml-endpoints", "digits", "{LEVEL: 8}")
            wait_until(lambda: b'"level": "8"' in post(url, NUMBERS)[1], cloud.logs)
            go.touch()
            status, body = answer.result()
        assert (status, json.loads(body)["level"]) == (200, "7")
        user.cli("unserve", "digits")
        end_and_check_bill(user, cloud, api)


def count_direct(user: User) -> int:
    """The requests that HAProxy has sent to the replica itself, without the gateway."""
    text = (user.home / "gateway" / "haproxy.cfg").read_text()
    [path] = re.findall(r"stats socket (\S+)", text)
    [service] = re.findall(r"^backend svc-(\S+)", text, re.MULTILINE)
    return HaproxyRuntime(Path(path)).read_load(service).arrivals


def test_haproxy_passes_requests_to_an_endpoint_whose_container_starts_again(
    cloud: EndpointCloud, tmp_path: Path
) -> None:
    need_haproxy()
    more = "[services]\nplane = 'haproxy'\ndomains = 'ai.example.com'\n"
    with azureml_user(cloud, tmp_path, more) as (user, api):
        host = "digits.ai.example.com"
        shown = serve(user, "azureml-endpoints", "digits", "{LEVEL: 7}", f"[{host}]")
        url = f"http://127.0.0.1:{urlsplit(shown).port}/invocations"

        def call() -> tuple[int, bytes]:
            return post(url, NUMBERS, Host=host)

        status, body = call()  # it waits in the gateway
        assert (status, json.loads(body)["sum"]) == (200, 6)
        wait_until(lambda: call()[0] == 200 and count_direct(user) > 1)
        user.kill_server()
        user.json("services")  # starts the server again
        status, again = call()
        assert (status, json.loads(again)["process"]) == (200, json.loads(body)["process"])

        wait_until(lambda: call()[0] == 200 and count_direct(user) > 1)
        [name] = api.containers.names()
        api.containers.end(name)
        assert call()[0] == 502  # lost, as with a replica on a machine
        api.containers.start_again(name)
        wait_until(lambda: call()[0] == 200)
        assert json.loads(call()[1])["process"] != json.loads(body)["process"]
        assert len(cloud.machines) == 1
        user.cli("unserve", "digits")
        end_and_check_bill(user, cloud, api)
