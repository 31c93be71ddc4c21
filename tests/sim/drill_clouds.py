"""Accounts at the stand-ins of all clouds on the shared layer, on the virtual time of a drill.

Each stand-in is asked by real HTTP, and that of Nebius by gRPC. The loop makes each request itself
and waits for the reply, so that no virtual time passes meanwhile.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from tests.contract.azure_stand_in import AzureStandIn
from tests.contract.ibm_stand_in import IbmStandIn
from tests.providers.azure.contract.test_provider_azure import AzurePlace
from tests.providers.clouds.contract.test_provider_ibm import IbmPlace
from tests.providers.clouds.contract.test_provider_nebius import NebiusPlace
from tests.providers.clouds.contract.test_provider_oci import OciPlace
from tests.providers.clouds.contract.test_provider_paperspace import PaperspacePlace
from tests.providers.gcp.contract.test_provider_gcp import GcpPlace
from tests.providers.gcp.contract.test_provider_tpu import TpuPlace

from cavvy.providers import (
    azure,
    ibm,
)
from cavvy.providers.azure import cloud as azure_cloud
from cavvy.providers.azure.cloud import AzureCloud
from cavvy.providers.contract import LaunchFault
from cavvy.providers.contract.memory_cloud import MemoryCloud
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace
from cavvy.providers.contract.rest_stand_in import RestServer, RestStandIn
from cavvy.providers.contract.sold import read_table
from cavvy.providers.ibm.cloud import IbmCloud
from cavvy.providers.installed import list_own
from cavvy.providers.nebius.api import NebiusApi
from cavvy.providers.registry import manifest_of
from cavvy.providers.vm import rest
from cavvy.providers.vm.abilities import REST_LAYER
from cavvy.providers.vm.cloud import CloudTraits

T = TypeVar("T")

START = datetime(2030, 1, 1, tzinfo=UTC)
FAULTS = 0.2  # of all requests, and of all launches that are answered
# Faults of launches alone.
_LAUNCH_FAULTS = (LaunchFault.FULL, LaunchFault.FULL, LaunchFault.FULL, LaunchFault.REFUSED)


class AtOnce(ThreadPoolExecutor):
    """Makes each call in the caller's thread: virtual time has no threads."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            future.set_exception(error)
        return future


class DrillCloud(MemoryCloud):
    """A cloud on the loop's time, whose launches fail at random."""

    random = Random(0)

    def __init__(self, traits: CloudTraits) -> None:
        super().__init__(traits)
        self.faults: Counter[str] = Counter()
        self.off_at: dict[str, datetime] = {}  # by machine: when it shut itself down
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def time(self) -> datetime:
        return START + timedelta(seconds=self.loop.time() if self.loop is not None else 0)

    @time.setter
    def time(self, value: datetime) -> None:
        return  # the clock cannot be set

    def _take_fault(self, machines: int) -> LaunchFault | None:
        if self.loop is None or self.random.random() >= FAULTS:
            return None
        kind = self.random.choice(_LAUNCH_FAULTS)
        self.faults[kind.value] += 1
        return kind


class OtherLoop:
    """An event loop in a thread of its own, for clients that need sockets."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run the call there, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class DrillPlace(RestPlace):
    make_cloud = DrillCloud


class DrillGcp(GcpPlace):
    make_cloud = DrillCloud


class DrillTpu(TpuPlace):
    make_cloud = DrillCloud


class DrillAzure(AzurePlace):
    make_cloud = DrillCloud


class DrillOci(OciPlace):
    make_cloud = DrillCloud


class DrillIbm(IbmPlace):
    make_cloud = DrillCloud

    def __init__(self, server: RestServer, home: Path) -> None:
        super().__init__(ibm, IbmCloud.traits, IbmStandIn, server, home)
        self.api.settings = {**self.api.settings, "image": "our-image"}  # has the GPU's driver


class DrillNebius(NebiusPlace):
    make_cloud = DrillCloud


class DrillPaperspace(PaperspacePlace):
    make_cloud = DrillCloud


def _list_cases() -> Iterator[tuple[str, type[RestContract]]]:
    """The contract test of each cloud with the layer for REST APIs, by provider."""
    for name, known in list_own().items():
        manifest = manifest_of(known)
        if manifest.layer == REST_LAYER:
            module = import_module(
                f"tests.providers.clouds.contract.test_provider_{name.replace('-', '_')}"
            )
            cases = [each for each in vars(module).values() if isinstance(each, type)]
            [case] = [
                each
                for each in cases
                if issubclass(each, RestContract)
                and getattr(each, "package", None) is import_module(known.module)
            ]
            yield name, case


def _choose_gpu(stand_in: type[RestStandIn]) -> str | None:
    """The accelerator of the cheapest machine, or None if the cloud sells machines without one."""
    sold = read_table(stand_in.sells)
    if any(each.accelerator is None for each in sold):
        return None
    return min(sold, key=lambda each: each.rate.micros_per_hour).accelerator


_CASES = dict(_list_cases())
# The accelerator of each cloud's jobs; jobs of other clouds have none if the cloud sells machines
# without accelerators.
_GPUS = {
    "azure": "T4",
    "crusoe": "L40S",
    "cudo": "A6000",
    "gcp": "L4",
    "ibm": "L4",
    "jarvislabs": "L4",
    "lambda": "A10",
    "nebius": "H100",
    "paperspace": "A4000",
    "primeintellect": "H100",
    "runpod": "A40",
    "shadeform": "A6000",
    "tpu": "TPU-v5e",
    "vast": "RTX4090",
}
GPUS = {name: gpu for name, case in _CASES.items() if (gpu := _choose_gpu(case.stand_in))} | _GPUS
SPOT = ("gcp", "azure", "ibm", "nebius", "tpu")


def make_places(server: RestServer, home: Path) -> Mapping[str, RestPlace]:
    """An account at each cloud, by provider."""

    def folder(name: str) -> Path:
        (home / name).mkdir()
        return home / name

    places: dict[str, RestPlace] = {
        name: DrillPlace(case.package, case.traits, case.stand_in, server, folder(name))
        for name, case in _CASES.items()
    }
    places["oci"] = DrillOci(server, folder("oci"))
    places["gcp"] = DrillGcp(server, folder("gcp"))
    places["tpu"] = DrillTpu(server, folder("tpu"))
    places["ibm"] = DrillIbm(server, folder("ibm"))
    places["nebius"] = DrillNebius(server, folder("nebius"))
    places["paperspace"] = DrillPaperspace(server, folder("paperspace"))
    places["azure"] = DrillAzure(azure, AzureCloud.traits, AzureStandIn, server, folder("azure"))
    return places


def close_places(places: Mapping[str, RestPlace]) -> None:
    """Close the clients of all clouds, and the servers that are not the common one."""
    for place in places.values():
        for provider in place._providers:
            asyncio.run(provider.close())
        if isinstance(place, DrillNebius):
            place.api.close()


@contextmanager
def without_threads() -> Iterator[None]:
    """Calls of clouds are made in the loop, without pauses in real time."""
    before = rest.ThreadPoolExecutor, azure_cloud.ThreadPoolExecutor, rest._PAUSE_S
    rest.ThreadPoolExecutor = azure_cloud.ThreadPoolExecutor = AtOnce  # type: ignore[misc,attr-defined]
    rest._PAUSE_S = 0.0
    other, call = OtherLoop(), NebiusApi._call

    async def call_at_once(*args: Any, **kwargs: Any) -> Any:
        return other.run(call(*args, **kwargs))

    NebiusApi._call = call_at_once  # type: ignore[method-assign]
    try:
        yield
    finally:
        NebiusApi._call = call  # type: ignore[method-assign]
        other.close()
        rest.ThreadPoolExecutor, azure_cloud.ThreadPoolExecutor = before[:2]  # type: ignore[misc,attr-defined]
        rest._PAUSE_S = before[2]
