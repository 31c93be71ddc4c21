"""A cloud in memory, on the real clock, whose machines boot their user data: each machine is a
process that runs the boot program with the real agent, which it fetches from the server.
"""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.contract.vm_cloud import MemoryCloud

from cavvy.providers.vm.cloud import CloudTraits, MachineRequest


class BootingCloud(MemoryCloud):
    """Machines need two seconds to be listed as running."""

    def __init__(self, traits: CloudTraits, folder: Path) -> None:
        super().__init__(replace(traits, list_lag=timedelta(0), ended_listed=timedelta(hours=1)))
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def time(self) -> datetime:
        return datetime.now(UTC)

    @time.setter
    def time(self, value: datetime) -> None:
        return  # the clock cannot be set

    async def create(self, request: MachineRequest) -> Sequence[str]:
        gpu = replace(request, offer=replace(request.offer, region="here", instance_type="small"))
        ids = await super().create(gpu)
        for each, script in zip(ids, request.user_data, strict=True):
            self._processes[each] = self._boot(self._folder / each, script)
        return ids

    async def delete(self, machine: str) -> None:
        await super().delete(machine)
        self.stop(machine)

    def stop(self, machine: str) -> None:
        process = self._processes.pop(machine, None)
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        for each in list(self._processes):
            self.stop(each)

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


def _part(script: str, end: str) -> str:
    """The file that the script writes between the lines with this word."""
    return script.split(f"<<'{end}'\n")[1].split(f"\n{end}\n")[0]
