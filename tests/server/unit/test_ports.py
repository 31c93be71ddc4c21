"""The server waits a moment for a port that another socket uses."""

import errno
import socket
import threading

import pytest

from cavvy.server.doors import open_port

LOCAL = "127.0.0.1"


@pytest.fixture
def held() -> socket.socket:
    """An outgoing connection can have the port, and does not share it."""
    made = socket.socket()
    made.bind((LOCAL, 0))
    return made


def test_a_port_that_becomes_free_is_opened(held: socket.socket) -> None:
    port = held.getsockname()[1]
    timer = threading.Timer(0.3, held.close)
    timer.start()
    with open_port(LOCAL, port, socket.AF_INET, wait_s=30) as opened:
        assert opened.getsockname()[1] == port
    timer.join()


def test_a_port_that_stays_in_use_is_an_error(held: socket.socket) -> None:
    with held, pytest.raises(OSError) as failure:
        open_port(LOCAL, held.getsockname()[1], socket.AF_INET, wait_s=0.2)
    assert failure.value.errno == errno.EADDRINUSE
