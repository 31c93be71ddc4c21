"""Accounts of clouds whose machines boot, on one wire: the stand-in of each cloud, the settings of a
user of the account, and how the cloud takes a machine back.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from tests.contract.azure_stand_in import SUBSCRIPTION, AzureStandIn
from tests.contract.gcp_stand_in import GcpStandIn
from tests.contract.lambda_stand_in import LambdaStandIn
from tests.contract.runpod_stand_in import RunpodStandIn
from tests.contract.vast_stand_in import VastStandIn
from tests.system.booting_cloud import BootingCloud, Namespaces, SshServers
from tests.system.hosts import Lab, lab_at
from tests.system.trust import User, user_at
from tests.waits import wait_until

from cavvy.domain.values import replace
from cavvy.providers.azure.cloud import AzureCloud
from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.gcp.cloud import GcpCloud
from cavvy.providers.lambda_cloud import LambdaCloud
from cavvy.providers.runpod import RunpodCloud
from cavvy.providers.vast import VastCloud
from cavvy.providers.vm.cloud import CloudTraits, Reach

NOTICE_S = 15.0  # before a machine is taken back; Google's and Azure's notice is 30 s


class BootedPlace:
    """An account. `table` has the settings of its provider, and `variables` are its user's. Its
    machines boot in `machines`, or in `servers` if the cloud's machines are reached by SSH.
    """

    table = ""

    def __init__(self, lab: Lab, traits: CloudTraits) -> None:
        self.machines = Namespaces(lab)
        self.servers = SshServers(lab)
        by_ssh = traits.reach is Reach.SSH
        self.cloud = BootingCloud(traits, self.servers if by_ssh else self.machines)
        self.variables: Mapping[str, str] = {}

    def take(self, machine: Rented) -> None:
        """The cloud takes the machine back: at once, or after its notice."""
        raise NotImplementedError

    def lose(self, machine: Rented) -> None:
        """The machine is gone, unless the server has deleted it."""
        if machine.id in [each.id for each in self.cloud.billed()]:
            self.cloud.lose(machine.id)

    def console(self) -> str:
        """What the machines wrote last, for a test that fails."""
        return self.machines.console() + self.servers.console()


class GcpPlace(BootedPlace):
    """A project at Google, with the key of a service account."""

    def __init__(self, lab: Lab, server: RestServer, root: Path) -> None:
        # the stand-in knows the tokens, not the cloud behind it
        super().__init__(lab, replace(GcpCloud.traits, tokens=False))
        self.api = GcpStandIn(self.cloud, server)
        self.api.operation_time = timedelta(0)
        key = root / "key.json"
        key.write_text(self.api.make_key_file())
        self.table = (
            f"[providers.gcp]\nendpoint = '{self.api.url}'\nkey_file = '{key}'\n"
            f"prices_endpoint = '{self.api.origin}'\n"
            "zones = 'us-central1-a'\nmachines = 'g2-standard-4'\n"
        )

    def take(self, machine: Rented) -> None:
        """Google announces a preemption on the machine, and then stops and deletes the machine."""
        self.machines.machines[machine.id].metadata.set(preempted="TRUE")
        _later(lambda: self.lose(machine))

    def lose(self, machine: Rented) -> None:
        self.api.preempted.add(machine.id)
        super().lose(machine)


class AzurePlace(BootedPlace):
    """A subscription at Azure; azure-identity finds the login of a stand-in for the program `az`."""

    def __init__(self, lab: Lab, server: RestServer, root: Path) -> None:
        super().__init__(lab, AzureCloud.traits)
        self.api = AzureStandIn(self.cloud, server)
        tool = root / "bin" / "az"
        tool.parent.mkdir()
        token = json.dumps({"accessToken": self.api.key, "expires_on": 4102444800})
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{token}\nEND\n")
        tool.chmod(0o755)
        self.variables = {
            "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}",
            "AZURE_TOKEN_CREDENTIALS": "AzureCliCredential",
        }
        self.table = (
            f"[providers.azure]\nendpoint = '{self.api.url}'\nsubscription = '{SUBSCRIPTION}'\n"
            f"prices_endpoint = '{self.api.url}'\nsizes = 'Standard_NC4as_T4_v3'\n"
        )

    def take(self, machine: Rented) -> None:
        """Azure schedules an event, whose start the machine may approve, and deletes the machine."""
        metadata = self.machines.machines[machine.id].metadata
        event = {
            "EventId": "1",
            "EventType": "Preempt",
            "Resources": [machine.name],
            "NotBefore": metadata.http_date(NOTICE_S),
        }
        metadata.set(events=[event])
        _later(lambda: self.lose(machine))


class LambdaPlace(BootedPlace):
    """An account at Lambda, which gives no notice."""

    def __init__(self, lab: Lab, server: RestServer, root: Path) -> None:
        super().__init__(lab, LambdaCloud.traits)
        self.api = LambdaStandIn(self.cloud, server)
        self.table = f"[providers.lambda]\nendpoint = '{self.api.url}'\nregions = 'us-east-1'\n"
        self.variables = {"LAMBDA_API_KEY": self.api.key}

    def take(self, machine: Rented) -> None:
        """The machine is lost: Lambda lists it as terminated."""
        self.lose(machine)


class RunpodPlace(BootedPlace):
    """An account at Runpod. The server reaches the pods by SSH."""

    def __init__(self, lab: Lab, server: RestServer, root: Path) -> None:
        super().__init__(lab, RunpodCloud.traits)
        self.api = RunpodStandIn(self.cloud, server)
        self.table = f"[providers.runpod]\nendpoint = '{self.api.url}'\n"
        self.variables = {"RUNPOD_API_KEY": self.api.key}


class VastPlace(BootedPlace):
    """An account at Vast.ai, which pauses preempted machines without a notice. The server reaches the
    instances by SSH.
    """

    def __init__(self, lab: Lab, server: RestServer, root: Path) -> None:
        super().__init__(lab, VastCloud.traits)
        self.api = VastStandIn(self.cloud, server)
        self.table = f"[providers.vast]\nendpoint = '{self.api.url}'\n"
        self.variables = {"VAST_API_KEY": self.api.key}

    def take(self, machine: Rented) -> None:
        """The machine is paused, and remains until it is deleted."""
        self.cloud.change(machine.id, off=True)
        self.servers.stop(machine.id)


MakePlace = Callable[[Lab, RestServer, Path], BootedPlace]


@contextmanager
def places_at(root: Path, *kinds: MakePlace) -> Iterator[list[BootedPlace]]:
    """Accounts of which nothing is left afterwards; this thread is on their wire meanwhile."""
    with lab_at(root) as lab, lab.entered():
        server = RestServer()
        places = [kind(lab, server, root) for kind in kinds]
        try:
            yield places
        finally:
            for each in places:
                each.cloud.close()
            server.close()
        assert [each.api.bugs for each in places] == [[]] * len(places)  # type: ignore[attr-defined]
        assert [each.cloud.billed() for each in places] == [[]] * len(places)


@contextmanager
def user_of(root: Path, places: list[BootedPlace]) -> Iterator[User]:
    """A user of these accounts; nothing of theirs is left. The server listens for machines only if
    some of them cannot be reached by SSH.
    """
    called = any(each.cloud.traits.reach is not Reach.SSH for each in places)
    listen = "[server]\ntls_listen = '10.99.0.254:7443'\n" if called else ""
    with user_at(root) as user:
        tables = "".join(each.table for each in places)
        user.settings(f"{listen}[providers.local]\nenabled = false\n{tables}")
        for each in places:
            user.variables |= each.variables
        yield user
        user.cli("down", "--all", "--yes")
        wait_until(lambda: not any(each.cloud.billed() for each in places))


def _later(call: Callable[[], object]) -> None:
    timer = threading.Timer(NOTICE_S, call)
    timer.daemon = True
    timer.start()
