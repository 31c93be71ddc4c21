"""Machines behind instance ids, which boot a launch's user data as root, with EC2's metadata service
(version 2 only).
"""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from tests.ec2.cloud import Cloud, Life
from tests.ec2.disks import Disk
from tests.ec2.server import Front, served
from tests.system.booted import BootedMachine, run
from tests.system.hosts import Lab, lab_at


class Booted:
    """Boots a machine behind each instance of a cloud."""

    def __init__(self, cloud: Cloud, lab: Lab) -> None:
        self.cloud, self.lab = cloud, lab
        self.machines: dict[str, BootedMachine] = {}
        self._loops: dict[str, str] = {}

    def boot(self, life: Life) -> None:
        machine = BootedMachine(
            self.lab,
            self.lab.count(),
            life.id,
            life.user_data,
            gone=lambda: self.cloud.shut_down_itself(life),
        )
        machine.metadata.told = {
            "instance-id": life.id,
            "ami-launch-index": str(life.index),
            "local-ipv4": machine.address,
            "instance-type": life.type,
        }
        self.machines[life.id] = machine
        life.instance.nics[0].private_ip_address = machine.address
        machine.boot()

    def kill(self, life: Life) -> None:
        self.machines[life.id].kill()

    def plug(self, life: Life, disk: Disk) -> None:
        """A block device appears under the name that NVMe disks have. Its size is not the
        volume's.
        """
        image = self.lab.root / f"{disk.id}.img"
        with image.open("ab") as file:
            file.truncate(64 << 20)
        loop = run("losetup", "-f", "--show", str(image)).strip()
        self._loops[disk.id] = loop
        self._name(life, disk).symlink_to(loop)

    def unplug(self, life: Life, disk: Disk) -> None:
        """The image keeps what was written."""
        self._name(life, disk).unlink()
        run("losetup", "-d", self._loops.pop(disk.id))

    def close(self) -> None:
        for machine in self.machines.values():
            machine.kill()
        for loop in self._loops.values():
            subprocess.run(["losetup", "-d", loop], check=False, capture_output=True)

    def _name(self, life: Life, disk: Disk) -> Path:
        name = f"nvme-Amazon_Elastic_Block_Store_{disk.id.replace('-', '')}"
        return self.machines[life.id].folder / "disks/by-id" / name

    def notice(self, life: Life, at: datetime) -> None:
        time = at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.machines[life.id].metadata.set(action={"action": "terminate", "time": time})


class Ec2:
    """A cloud whose instances boot, at an address on the lab's wire."""

    def __init__(self, cloud: Cloud, booted: Booted, lab: Lab, endpoint: str) -> None:
        self.cloud, self.machines, self.lab, self.endpoint = cloud, booted.machines, lab, endpoint


@contextmanager
def ec2_at(root: Path) -> Iterator[Ec2]:
    """An EC2 of which nothing is left afterwards; this thread is on its wire meanwhile."""
    with lab_at(root) as lab, lab.entered():
        cloud = Cloud()
        booted = Booted(cloud, lab)
        cloud.machines = booted
        over = threading.Event()

        def keep_time() -> None:
            while not over.wait(0.1):
                cloud.tick()

        clock = threading.Thread(target=keep_time, daemon=True)
        clock.start()
        try:
            with served(Front(cloud), "10.99.0.254") as endpoint:
                yield Ec2(cloud, booted, lab, endpoint)
        finally:
            over.set()
            clock.join(10)
            booted.close()
