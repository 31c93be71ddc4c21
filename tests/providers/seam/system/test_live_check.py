"""`cavvy check NAME --live` on a stand-in whose machines boot: the real command, server and agent."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.contract.lambda_stand_in import LambdaStandIn
from tests.system.booting_cloud import BootingCloud, Processes
from tests.system.ports import free_port
from tests.system.trust import User, user_at
from tests.waits import wait_until

from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.lambda_cloud import LambdaCloud

pytestmark = pytest.mark.system


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[BootingCloud]:
    cloud = BootingCloud(LambdaCloud.traits, Processes(tmp_path / "machines"))
    yield cloud
    cloud.close()
    assert cloud.billed() == []


@contextmanager
def lambda_user(cloud: BootingCloud, root: Path) -> Iterator[User]:
    server = RestServer()
    api = LambdaStandIn(cloud, server)
    with user_at(root) as user:
        user.settings(
            f"[server]\ntls_listen = '127.0.0.1:{free_port()}'\n[providers.local]\nenabled = false\n"
            f"[providers.lambda]\nendpoint = '{api.url}'\n"
        )
        user.variables = {"LAMBDA_API_KEY": LambdaStandIn.key}
        yield user
        assert api.bugs == []
    server.close()


def test_a_machine_is_rented_billed_removed_and_recorded(
    cloud: BootingCloud, tmp_path: Path
) -> None:
    with lambda_user(cloud, tmp_path / "user") as user:
        told = user.json("check", "lambda", "--live")
        assert (told["problem"], told["left"]) == ("", [])
        steps = [step["text"] for step in told["steps"]]
        assert any("the agent of rank 0 reported in" in text for text in steps)
        assert steps[-1] == "the machine is gone"
        minute = 200_000 // 60  # the cheapest type of the stand-in costs 20 cents an hour
        assert minute <= told["bill_micros"] < 10 * minute
        (machine,) = cloud.machines
        assert machine.ended is not None
        text = Path(told["recording"]).read_text()
        assert LambdaStandIn.key not in text
        assert "END_OF_BOOT" not in text
        writes = [each["call"] for each in json.loads(text)["calls"] if each["writes"]]
        assert writes == [
            "POST /instance-operations/launch",
            "POST /instance-operations/terminate",
        ]


def test_an_interrupted_check_removes_its_machine(cloud: BootingCloud, tmp_path: Path) -> None:
    with lambda_user(cloud, tmp_path / "user") as user:
        command = user.start("check", "lambda", "--live")
        wait_until(cloud.billed)
        command.send_signal(signal.SIGINT)
        out, err = command.communicate()
        assert command.returncode == 1, out + err
        assert "keep this computer on and connected until the machine is removed" in err
        assert "interrupted; the machine is being removed" in err
        assert cloud.billed() == []


def test_nothing_is_rented_above_the_limit(cloud: BootingCloud, tmp_path: Path) -> None:
    with lambda_user(cloud, tmp_path / "user") as user:
        said = user.cli("check", "lambda", "--live", "--max-usd", "0.01", code=1)
        assert "cpu_4x_general in us-east-1, costs $0.03 for 10 minutes" in said
        assert "nothing was rented" in said
        assert cloud.machines == []
