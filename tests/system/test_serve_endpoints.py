"""`cavvy serve` on managed endpoints: the stand-in runs each endpoint's container as a process."""

import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tests.contract import vm_cloud
from tests.contract.sagemaker_endpoints_stand_in import EndpointsStandIn
from tests.contract.sagemaker_stand_in import IMAGE, ROLE
from tests.contract.test_provider_sagemaker_endpoints import TRAITS
from tests.system.containers import ContainerCloud
from tests.system.test_managed_jobs import free_port, service_user
from tests.system.trust import User, environment
from tests.waits import START_S, wait_until

from cavvy.client.service_wire import ReplicaView, find_service

pytestmark = pytest.mark.system
PROGRAM = Path(__file__).with_name("endpoint_container.py")
TASK = """
name: {name}
run: serve
env: {env}
resources: {{providers: [sagemaker-endpoints]}}
service:
  port: 8080
  probe: {{path: /ping, every: 1s, timeout: 1s}}
  replicas: {{min: 0, max: 1}}
"""


class EndpointCloud(ContainerCloud):
    """Endpoints are billed until they are deleted, also if their container has ended."""

    def _notice_ends(self) -> None:
        return


class RunningEndpoints(EndpointsStandIn):
    """Endpoints whose containers run. An endpoint is in service once its container answers /ping,
    and has failed if the container ends before that.
    """

    cloud: ContainerCloud
    deletes = timedelta(0)

    def __init__(self, cloud: ContainerCloud) -> None:
        super().__init__(cloud)
        self.ports: dict[str, int] = {}
        self.ids: dict[str, str] = {}
        self.seen_up: set[str] = set()

    def start_endpoint(self, region: str, name: str) -> None:
        super().start_endpoint(region, name)
        self.ids[name] = machine = self.machines(region, name)[-1].id
        self.ports[name] = port = free_port()
        given = self.models[region, name]["PrimaryContainer"]["Environment"]
        command = [sys.executable, str(PROGRAM), "serve"]
        self.cloud.run(machine, command, {**given, "MAPPED_PORT": str(port)})

    def is_up(self, name: str) -> bool:
        if name in self.seen_up:
            return True
        if self.cloud.exit_code(self.ids[name]) is not None:
            self.failures[name] = "The primary container did not pass the ping health check."
            return False
        try:
            urlopen(f"http://127.0.0.1:{self.ports[name]}/ping", timeout=START_S).close()
        except OSError:
            return False
        self.seen_up.add(name)
        return True

    def answer_call(self, name: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        return post(f"http://127.0.0.1:{self.ports[name]}/invocations", body)

    def end_container(self, name: str) -> None:
        self.cloud.stop(self.ids[name])


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndpointCloud]:
    monkeypatch.setattr(vm_cloud, "BOOT", timedelta(0))
    cloud = EndpointCloud(TRAITS, tmp_path / "containers")
    yield cloud
    cloud.close()


def post(url: str, body: bytes) -> tuple[int, bytes]:
    try:
        with urlopen(Request(url, data=body), timeout=START_S) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, error.read()


def serve(user: User, name: str, env: str) -> str:
    (user.work / f"{name}.yaml").write_text(TASK.format(name=name, env=env))
    return str(user.json("serve", "--yes", f"{name}.yaml")["url"])


def read_replica(user: User) -> ReplicaView:
    with environment(user.environ):
        return find_service(user.api, "default", "digits").replicas[0]


def test_an_endpoint_serves_outlives_the_server_and_is_deleted(
    cloud: EndpointCloud, tmp_path: Path
) -> None:
    api = RunningEndpoints(cloud)
    table = f"role = '{ROLE}'\nimage = '{IMAGE}'\n"
    with service_user(api, "sagemaker-endpoints", table, tmp_path / "user") as user:
        url = f"{serve(user, 'digits', '{LEVEL: 7}')}/invocations"
        broken = f"{serve(user, 'broken', '{LEVEL: 1, BROKEN: 1}')}/invocations"
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
        assert replica.place == "sagemaker-endpoints/us-east-1/on-demand"
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
        wait_until(lambda: (api.models, api.configs) == ({}, {}), lambda: str(api.models))
        [digits] = [each for each in user.json("cost", "--by", "service") if each["spent_micros"]]
        jobs = user.json("ps", "--all")
        assert digits["spent_micros"] == sum(each["spent_micros"] for each in jobs) > 0
        log = (user.home / "server.log").read_text()
        assert "pass failed" not in log, log[-3000:]
