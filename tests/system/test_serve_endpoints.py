"""`cavvy serve` on managed endpoints: the stand-in runs each endpoint's container as a process."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tests.contract.sagemaker_endpoints_stand_in import EndpointsStandIn
from tests.contract.sagemaker_stand_in import IMAGE, ROLE
from tests.contract.test_provider_sagemaker_endpoints import TRAITS
from tests.contract.test_provider_vertex_endpoints import IMAGE as VERTEX_IMAGE
from tests.contract.vertex_endpoints_stand_in import VertexEndpointsStandIn
from tests.system.containers import ContainerCloud
from tests.system.test_managed_jobs import free_port, managed_user, service_user
from tests.system.trust import User, environment
from tests.waits import START_S, wait_until

from cavvy.client.service_wire import ReplicaView, find_service
from cavvy.providers.contract import memory_cloud
from cavvy.providers.contract.rest_stand_in import RestServer

pytestmark = pytest.mark.system
PROGRAM = Path(__file__).with_name("endpoint_container.py")
TASK = """
name: {name}
run: serve
env: {env}
resources: {{providers: [{provider}]}}
service:
  port: 8080
  probe: {{path: /ping, every: 1s, timeout: 1s}}
  replicas: {{min: 0, max: 1}}
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
        self._up: set[str] = set()

    def start(self, name: str, machine: str, environment: Mapping[str, str]) -> None:
        self._ids[name], self._ports[name] = machine, free_port()
        given = {**environment, "MAPPED_PORT": str(self._ports[name])}
        self._cloud.run(machine, [sys.executable, str(PROGRAM), "serve"], given)

    def is_up(self, name: str) -> bool:
        if name in self._up:
            return True
        if self._cloud.exit_code(self._ids[name]) is not None:
            self._failures[name] = "The primary container did not pass the ping health check."
            return False
        try:
            urlopen(f"http://127.0.0.1:{self._ports[name]}/ping", timeout=START_S).close()
        except OSError:
            return False
        self._up.add(name)
        return True

    def answer(self, name: str, body: bytes) -> tuple[int, bytes]:
        return post(f"http://127.0.0.1:{self._ports[name]}/invocations", body)

    def end(self, name: str) -> None:
        self._cloud.stop(self._ids[name])


class RunningEndpoints(EndpointsStandIn):
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

    def is_up(self, name: str) -> bool:
        return self.containers.is_up(name)

    def answer_call(self, name: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        return self.containers.answer(name, body)

    def end_container(self, name: str) -> None:
        self.containers.end(name)

    def left(self) -> object:
        """What is left of models and endpoints, besides the machines."""
        return [*self.models, *self.configs]


class RunningVertexEndpoints(VertexEndpointsStandIn):
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

    def is_up(self, name: str) -> bool:
        return self.containers.is_up(name)

    def answer_call(self, name: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        return self.containers.answer(name, body)

    def end_container(self, name: str) -> None:
        self.containers.end(name)

    def left(self) -> object:
        return [*self.models, *self.endpoints]


@contextmanager
def sagemaker_user(
    cloud: "EndpointCloud", root: Path
) -> Iterator[tuple[User, RunningEndpoints | RunningVertexEndpoints]]:
    api = RunningEndpoints(cloud)
    table = f"role = '{ROLE}'\nimage = '{IMAGE}'\n"
    with service_user(api, "sagemaker-endpoints", table, root / "user") as user:
        yield user, api


@contextmanager
def vertex_user(
    cloud: "EndpointCloud", root: Path
) -> Iterator[tuple[User, RunningEndpoints | RunningVertexEndpoints]]:
    server = RestServer()
    api = RunningVertexEndpoints(cloud, server)
    key = root / "key.json"
    key.write_text(api.make_key_file())
    table = f"key_file = '{key}'\nimage = '{VERTEX_IMAGE}'\nendpoint = '{api.url}'\n"
    with managed_user(cloud, "vertex-endpoints", table, root / "user") as user:
        yield user, api
    assert api.bugs == []
    server.close()


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndpointCloud]:
    monkeypatch.setattr(memory_cloud, "BOOT", timedelta(0))
    cloud = EndpointCloud(TRAITS, tmp_path / "containers")
    yield cloud
    cloud.close()


def post(url: str, body: bytes) -> tuple[int, bytes]:
    try:
        with urlopen(Request(url, data=body), timeout=START_S) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def serve(user: User, provider: str, name: str, env: str) -> str:
    text = TASK.format(name=name, env=env, provider=provider)
    (user.work / f"{name}.yaml").write_text(text)
    return str(user.json("serve", "--yes", f"{name}.yaml")["url"])


def read_replica(user: User) -> ReplicaView:
    with environment(user.environ):
        return find_service(user.api, "default", "digits").replicas[0]


@pytest.mark.parametrize("as_user", [sagemaker_user, vertex_user])
def test_an_endpoint_serves_outlives_the_server_and_is_deleted(
    cloud: EndpointCloud,
    tmp_path: Path,
    as_user: Callable[..., AbstractContextManager[tuple[User, Any]]],
) -> None:
    with as_user(cloud, tmp_path) as (user, api):
        provider = api.place.partition("/")[0]
        url = f"{serve(user, provider, 'digits', '{LEVEL: 7}')}/invocations"
        broken = f"{serve(user, provider, 'broken', '{LEVEL: 1, BROKEN: 1}')}/invocations"
        numbers = b'{"numbers": [1, 2, 3]}'
        waiting = ThreadPoolExecutor(1)
        waiting.submit(post, broken, numbers)
        with ThreadPoolExecutor(5) as pool:  # they wait for the endpoint
            answers = list(pool.map(lambda _: post(url, numbers), range(5)))
        assert [status for status, _ in answers] == [200] * 5, (answers, cloud.logs())
        told = [json.loads(body) for _, body in answers]
        assert {(each["sum"], each["level"]) for each in told} == {(6, "7")}
        assert post(url, b"{}")[0] == 400  # the container's own status
        assert post(url.replace("invocations", "other"), numbers)[0] == 404
        replica = read_replica(user)
        assert replica.place == api.place
        assert {"machine", "load"} <= set(replica.start_s)

        user.kill_server()
        user.json("services")  # starts the server again
        status, body = post(url, numbers)
        assert (status, json.loads(body)["process"]) == (200, told[0]["process"])

        wait_until(
            lambda: "ping health check" in str(user.json("services", "show", "broken")),
            lambda: str(user.json("services", "show", "broken")),
        )
        user.cli("unserve", "broken")
        waiting.shutdown()
        user.cli("unserve", "digits")
        wait_until(lambda: user.json("services") == [])
        wait_until(lambda: [each for each in cloud.billed() if not each.off] == [])
        wait_until(lambda: api.left() == [], lambda: str(api.left()))
        services = user.json("cost", "--by", "service")
        jobs = user.json("ps", "--all")
        spent = sum(each["spent_micros"] for each in services)
        assert spent == sum(each["spent_micros"] for each in jobs) > 0
        log = (user.home / "server.log").read_text()
        assert "pass failed" not in log, log[-3000:]
