"""Whether a machine may separate the jobs of projects."""

import socket

import pytest

from cavvy.providers.base import Refused
from cavvy.providers.hosts.isolation import HostIsolation, find_metadata, read_isolation


def test_the_setting_has_few_values() -> None:
    assert read_isolation("ssh", {}) is HostIsolation.ONE_PROJECT
    assert read_isolation("ssh", {"isolation": "none"}) is HostIsolation.NONE
    mode = read_isolation("local", {"isolation": "namespaces"}, namespaces=True)
    assert mode is HostIsolation.NAMESPACES
    for value in ("namespaces", "users"):
        with pytest.raises(Refused, match=f"expected `none`, not '{value}'"):
            read_isolation("ssh", {"isolation": value})


def test_a_metadata_service_is_found_without_a_question() -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        port = service.getsockname()[1]
        assert find_metadata(["127.0.0.1"], port) == "127.0.0.1"
        line, _ = service.accept()
        with line:
            assert line.recv(1) == b""
    assert find_metadata(["127.0.0.1"], port) == ""
