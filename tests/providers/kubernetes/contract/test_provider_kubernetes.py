"""The Kubernetes provider keeps the contract, on a real cluster."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.contract.stand_in import StandInPlace, pack_stand_in
from tests.proofs import Proof
from tests.system.kubernetes.cluster import Cluster, shared_or_skip

from cavvy.providers.base import ProviderContext
from cavvy.providers.contract import (
    ContractHarness,
    ProviderContract,
    ProviderUnderTest,
    RepairTests,
)
from cavvy.providers.contract.harness import Play
from cavvy.providers.kubernetes import MANIFEST
from cavvy.providers.kubernetes.provider import KubernetesProvider

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300, func_only=True),
]  # a cluster may have to be built first
PROOF = Proof("kubernetes", True, "Kubernetes 1.20 with two kubelets in network namespaces")

NUMBERS = count(1)
# In the agent's place: it works until it is told to go, and leaves when its pod has a file
# `finish`.
STAND_IN = """
import json, os, signal, sys, time
with open(sys.argv[-1]) as file:
    home = json.load(file)["home"]
os.makedirs(home, exist_ok=True)
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
while not told and not os.path.exists("/tmp/finish"):
    time.sleep(0.02)
with open(home + "/exit.json", "w") as file:
    json.dump({"outcome": "stopped" if told else "succeeded", "exit_code": 143 if told else 0, "reason": ""}, file)
"""


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return shared_or_skip()


class KubernetesPlace(StandInPlace):
    """A namespace with a stand-in for the agent; `later` shifts the providers' clock."""

    pause_s = 0.1

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.folder = folder
        self.later = timedelta(0)
        self.providers: list[KubernetesProvider] = []
        self.settings: dict[str, str | int | float | bool] = {"price_usd_gpu_hr": "H100=2.5 1"}

    def provider(self, installation: str) -> KubernetesProvider:
        context = ProviderContext(
            installation=installation,
            home=self.folder,
            settings={
                "kubeconfig": str(self.cluster.kubeconfig),
                "namespace": self.namespace,
                "image": "localhost/python:1",
                **self.settings,
            },
            agent_archive=lambda: pack_stand_in(STAND_IN),
            now=lambda: datetime.now(UTC) + self.later,
        )
        provider = KubernetesProvider(MANIFEST, context)
        self.providers.append(provider)
        return provider

    async def _settled(self) -> bool:
        for pod in await self._pods():
            states = {
                state
                for each in pod["status"].get("containerStatuses", ())
                for state in each["state"]
            }
            if states != {"terminated"} and (
                states != {"running"} or "deletionTimestamp" in pod["metadata"]
            ):
                await self._look(pod["metadata"]["labels"])  # what waits for a look goes on
                return False
        return True

    async def _look(self, labels: dict[str, str]) -> None:
        for provider in self.providers:
            if provider.mark == labels["cavvy/installation"]:
                await provider.gangs(labels["cavvy/gang"])

    async def _pods(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self.cluster.pods, self.namespace)

    async def _finish(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        touch = ("exec", "-n", self.namespace, name, "--", "touch", "/tmp/finish")
        await asyncio.to_thread(self.cluster.kubectl, *touch)

    async def lose(self, rank: int) -> None:
        for pod in await self._pods():
            running = pod["status"]["phase"] == "Running"
            if running and pod["metadata"]["labels"]["cavvy/rank"] == str(rank):
                await self._finish(pod)
                await self._until(partial(self._is_over, pod["metadata"]["name"]))

    async def _is_over(self, name: str) -> bool:
        found = await self._pods()
        return all(
            x["status"]["phase"] != "Running" for x in found if x["metadata"]["name"] == name
        )

    def billed(self) -> int:
        found = self.cluster.pods(self.namespace)
        return sum(pod["status"]["phase"] in ("Pending", "Running") for pod in found)

    async def end(self, gang: str) -> None:
        for pod in await self._pods():
            if pod["metadata"]["labels"]["cavvy/gang"] == gang:
                await self._finish(pod)
        await self.until_ended(gang, self.providers)


class Scene(ContractHarness):
    """A stage that leaves its pods to the end of their namespace, which nobody waits for."""

    async def clear(self) -> None:
        for _, provider in self._made:
            assert isinstance(provider, KubernetesProvider)
            await provider.close()


class TestKubernetes(ProviderContract, RepairTests):
    @pytest.fixture
    def place(self, cluster: Cluster, tmp_path: Path) -> Iterator[ProviderUnderTest]:
        namespace = f"scenario-{next(NUMBERS)}"
        cluster.make_namespace(namespace)
        yield KubernetesPlace(cluster, namespace, tmp_path)
        cluster.drop_namespace(namespace)

    def make_play(self, place: ProviderUnderTest) -> Play:
        async def run(scenario: Callable[[ContractHarness], Awaitable[None]]) -> None:
            uow = Scene(place, self.lose_reply)
            try:
                await scenario(uow)
            finally:
                await uow.clear()

        return lambda scenario: self.run_scenario(run(scenario))
