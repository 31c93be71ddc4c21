"""A cloud in memory, on the real clock, whose machines boot their user data with the real agent, which
they fetch from the server: as processes, as machines in namespaces, or as hosts with an SSH server.
"""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Protocol

from tests.system.booted import BootedMachine
from tests.system.hosts import Lab, LabHost

from cavvy.domain.values import replace
from cavvy.providers.contract.memory_cloud import MemoryCloud
from cavvy.providers.vm.cloud import CloudTraits, MachineRequest, SshTarget

BOOTS = timedelta(seconds=2)


class Hosts(Protocol):
    """What boots something behind the ids of machines."""

    def boot(self, machine: str, name: str, script: str, gone: Callable[[], object]) -> str | None:
        """Boot the machine; returns its address. `gone` is called when it shuts itself down."""

    def stop(self, machine: str) -> None:
        """The machine's power is cut."""


class BootingCloud(MemoryCloud):
    """Machines are listed as running after `BOOTS`."""

    def __init__(self, traits: CloudTraits, hosts: Hosts) -> None:
        super().__init__(replace(traits, list_lag=timedelta(0), ended_listed=timedelta(hours=1)))
        self.boot_time = BOOTS
        self._hosts = hosts
        self._lock = threading.RLock()  # machines shut themselves down while others are started

    @property
    def time(self) -> datetime:
        return datetime.now(UTC)

    @time.setter
    def time(self, value: datetime) -> None:
        return  # the clock cannot be set

    def add(self, name: str, tags: dict[str, str]) -> str:
        with self._lock:
            return super().add(name, tags)

    def change(self, machine: str, **values: object) -> None:
        with self._lock:
            super().change(machine, **values)

    async def create(self, request: MachineRequest) -> Sequence[str]:
        ids = await super().create(request)
        for each, name, script in zip(ids, request.names, request.user_data, strict=True):
            gone = partial(self.shut_down, each)
            address = self._hosts.boot(each, name, script, gone)
            if address is not None:
                self.addresses[each] = address
                self.targets[each] = SshTarget(address=address)
        return ids

    def shut_down(self, machine: str) -> None:
        """The machine has shut itself down."""
        if machine in [each.id for each in self.billed()]:
            self.change(machine, off=True)

    async def delete(self, machine: str) -> None:
        await super().delete(machine)
        self._hosts.stop(machine)

    def lose(self, machine: str) -> None:
        """The cloud loses the machine: its power is cut, and it is no longer billed."""
        self.change(machine, ended=self.time)
        self._hosts.stop(machine)

    def close(self) -> None:
        for each in self.machines:
            self._hosts.stop(each.id)


class Processes:
    """Machines are processes that run the boot program in a folder each. They need no root."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def boot(self, machine: str, name: str, script: str, gone: Callable[[], object]) -> None:
        self._processes[machine] = self._boot(self._folder / machine, script)

    def stop(self, machine: str) -> None:
        process = self._processes.pop(machine, None)
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _boot(self, folder: Path, script: str) -> "subprocess.Popen[bytes]":
        """Do what the script does, without changing this machine."""
        folder.mkdir(parents=True)
        (folder / "boot.json").write_text(_part(script, "END_OF_BOOT"))
        (folder / "boot.py").write_text(_part(script, "END_OF_PYTHON"))
        address = json.loads(_part(script, "END_OF_BOOT"))["config"]["address"]
        archive = re.search(r"cavvy_fetch (\w+) agent\.pyz", script)
        assert archive is not None
        trusting = ssl._create_unverified_context()  # the file is named by its hash
        with urllib.request.urlopen(f"{address}/boot/v1/{archive[1]}", context=trusting) as file:
            (folder / "agent.pyz").write_bytes(file.read())
        with (folder / "log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(folder / "boot.py"), sys.executable],
                start_new_session=True,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


class Namespaces:
    """Machines are namespaces on a lab's wire, which run the user data as root."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.machines: dict[str, BootedMachine] = {}

    def boot(self, machine: str, name: str, script: str, gone: Callable[[], object]) -> str:
        booted = BootedMachine(self.lab, self.lab.count(), machine, script.encode(), gone)
        booted.metadata.name = name
        self.machines[machine] = booted
        booted.boot()
        return booted.address

    def stop(self, machine: str) -> None:
        self.machines[machine].kill()

    def console(self) -> str:
        """The ends of the machines' consoles, for a test that fails."""
        logs = [(each.name, each.log) for each in self.machines.values() if each.log.exists()]
        return "\n".join(f"--- {name}\n{log.read_text()[-3000:]}" for name, log in logs)


class SshServers:
    """Machines are hosts of a lab that run the user data and then an SSH server: the cloud's users
    start everything else by SSH.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.machines: dict[str, LabHost] = {}

    def boot(self, machine: str, name: str, script: str, gone: Callable[[], object]) -> str:
        self.machines[machine] = self.lab.add(script=script)
        return self.machines[machine].address

    def stop(self, machine: str) -> None:
        host = self.machines[machine]
        if host in self.lab.hosts:
            self.lab.remove(host)

    def console(self) -> str:
        """The ends of what the SSH servers wrote, for a test that fails."""
        logs = [(each.name, each.folder / "sshd.log") for each in self.machines.values()]
        return "\n".join(f"--- {name}\n{log.read_text()[-3000:]}" for name, log in logs)


def _part(script: str, end: str) -> str:
    """The file that the script writes between the lines with this word."""
    return script.split(f"<<'{end}'\n")[1].split(f"\n{end}\n")[0]
