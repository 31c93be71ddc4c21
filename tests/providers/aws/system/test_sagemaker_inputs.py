"""SageMaker copies a channel before the container starts, and the work reads it: by the real command,
server and agent.
"""

import os
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.sagemaker_stand_in import ROLE
from tests.providers.aws.contract.test_provider_sagemaker import TRAITS
from tests.providers.seam.system.test_managed_jobs import IMAGE, SageMakerContainers, service_user
from tests.system.containers import ContainerCloud

from cavvy.providers.contract import memory_cloud
from cavvy.providers.contract.memory_cloud import Rented

pytestmark = pytest.mark.system
ROOT = Path("/opt/ml/input/data")
OBJECTS = {
    "s3://data/digits/part-0.txt": "zero one two",
    "s3://data/digits/deep/part-1.txt": "three four",
    "s3://data/digits2/part-0.txt": "of another folder",
}


class FilledChannels(SageMakerContainers):
    """Training jobs whose channels SageMaker copies."""

    def start(self, region: str, job: str, nodes: int) -> list[Rented]:
        for channel in self.bodies[region, job]["InputDataConfig"]:
            prefix = channel["DataSource"]["S3DataSource"]["S3Uri"]
            for uri, text in OBJECTS.items():
                if uri.startswith(prefix):
                    file = ROOT / channel["ChannelName"] / uri.removeprefix(prefix)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(text)
        return super().start(region, job, nodes)


@pytest.fixture
def channel() -> Iterator[str]:
    """The name of a channel that no other test of this machine uses. The folder of channels is
    SageMaker's own, so the test needs the right to write there.
    """
    missing = [each for each in (ROOT, *ROOT.parents) if not each.exists()]
    name = f"cavvy{os.getpid()}"
    try:
        (ROOT / name).mkdir(parents=True)
    except PermissionError as error:
        pytest.skip(f"SageMaker's folder cannot be written: {error}")
    yield name
    shutil.rmtree(ROOT / name)
    for each in missing:
        if not any(each.iterdir()):
            each.rmdir()


def test_the_work_reads_an_input_that_sagemaker_has_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channel: str
) -> None:
    monkeypatch.setattr(memory_cloud, "BOOT", timedelta(0))
    cloud = ContainerCloud(TRAITS, tmp_path / "containers")
    sagemaker = FilledChannels(cloud)
    table = f"role = '{ROLE}'\nbucket = 's3://bucket/cavvy'\nimage = '{IMAGE}'\n"
    try:
        with service_user(sagemaker, "sagemaker", table, tmp_path / "user") as user:
            name = user.submit(
                "name: reads\nresources: {gpu: T4}\ninputs:\n"
                f"  - {{source: s3://data/digits/, target: {ROOT}/{channel}, "
                "region: us-east-1}\n"
                f'run: cd "$SM_CHANNEL_{channel.upper()}" && cat part-0.txt deep/part-1.txt\n',
                "--yes",
            )
            job = user.ended(name)
            assert job.phase == "done", f"{user.log(name)}\n{cloud.logs()}"
            assert "zero one two" in user.log(name)
            assert "three four" in user.log(name)
            assert "of another folder" not in user.log(name)
    finally:
        cloud.close()
