"""A cloud in memory, on the real clock, whose machines are the containers of a managed service: each
is a process that runs the container's real command, which fetches the real agent from the server.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.waits import PATIENCE_S

from cavvy.domain.values import replace
from cavvy.providers.contract.memory_cloud import MemoryCloud
from cavvy.providers.vm.cloud import CloudMachine, CloudTraits


class ContainerCloud(MemoryCloud):
    """A machine ends with its process. Machines need a second to be listed as running. `pooled`
    machines belong to a pool and stay until they are deleted.
    """

    def __init__(self, traits: CloudTraits, folder: Path, *, pooled: bool = False) -> None:
        super().__init__(
            replace(traits, tags=True, list_lag=timedelta(0), ended_listed=timedelta(hours=1))
        )
        self.folder, self._pooled = folder, pooled
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def time(self) -> datetime:
        return datetime.now(UTC)

    @time.setter
    def time(self, value: datetime) -> None:
        return  # the clock cannot be set

    def run(self, machine: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the container of a machine."""
        folder = self.folder / machine
        folder.mkdir(parents=True)
        with (folder / "log").open("wb") as log:
            self._processes[machine] = subprocess.Popen(
                command,
                env={
                    "PATH": os.environ["PATH"],
                    "CAVVY_FOLDER": str(folder / "cavvy"),
                    **environment,
                },
                start_new_session=True,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def exit_code(self, machine: str) -> int | None:
        """How the container of a machine ended; None if it runs, or was not started yet."""
        process = self._processes.get(machine)
        return None if process is None else process.poll()

    async def list(self) -> Sequence[CloudMachine]:
        self._notice_ends()
        return await super().list()

    async def get(self, machine: str) -> CloudMachine | None:
        self._notice_ends()
        return await super().get(machine)

    async def delete(self, machine: str) -> None:
        await super().delete(machine)
        threading.Thread(target=self.stop, args=(machine,), daemon=True).start()

    def stop(self, machine: str) -> None:
        """End a container as services do: SIGTERM, and SIGKILL if it is still there later."""
        process = self._processes.get(machine)
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def end_together(self, first: str, others: Sequence[str]) -> None:
        """End the other containers once the first one has ended."""

        def follow() -> None:
            self._processes[first].wait()
            for each in others:
                self.stop(each)

        threading.Thread(target=follow, daemon=True).start()

    def logs(self) -> str:
        """What the containers wrote, for a test that fails."""
        texts = [(each.parent.name, each.read_text()[-3000:]) for each in self.folder.glob("*/log")]
        return "\n".join(f"--- {name}\n{text}" for name, text in texts)

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _notice_ends(self) -> None:
        if self._pooled:
            return
        for machine, process in self._processes.items():
            if process.poll() is not None and machine in [each.id for each in self.billed()]:
                self.change(machine, ended=self.time)
