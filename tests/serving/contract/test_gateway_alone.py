"""A gateway of a server that others can replace ends if its server is dead or paused."""

import socket
import time

from tests.contract.gateway_process import GatewayProcess
from tests.waits import START_S


def test_a_gateway_ends_when_its_connected_server_is_silent() -> None:
    gateway = GatewayProcess(alone_s=2)
    try:
        with socket.socket(socket.AF_UNIX) as paused:
            paused.connect(gateway.config["control"])
            for _ in range(6):
                gateway.control(type="statistics")
                time.sleep(0.5)
            assert gateway.process.poll() is None, "it was asked"
            assert gateway.process.wait(START_S) == 0
    finally:
        gateway.remove()
