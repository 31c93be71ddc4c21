"""What the host of sandboxes does when its machine has no more files."""

import asyncio
import errno
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.capabilities.sandboxes.on_node.host import HostCaller, HostedSandbox
from cavvy.capabilities.sandboxes.options import SandboxOptions, check_variables, make_options
from cavvy.sdk.errors import InvalidArgument


def test_a_program_that_gets_no_pipes_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its caller hears of it."""
    left, pipe = [2], os.pipe2

    def open_pipe(flags: int) -> tuple[int, int]:
        if not left[0]:
            raise OSError(errno.EMFILE, "too many open files")
        left[0] -= 1
        return pipe(flags)

    async def run() -> list[dict[str, Any]]:
        host: Any = SimpleNamespace(loop=asyncio.get_running_loop())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            sandbox = HostedSandbox(host, "x", SandboxOptions().to_wire(), ours)
            caller = HostCaller(host, here=False)
            told: list[dict[str, Any]] = []
            monkeypatch.setattr(caller, "send", lambda head, body=b"": told.append(head))

            async def answer(_: object, op: str, number: int, head: dict[str, Any]) -> object:
                return sandbox.start(caller, number, head)

            host.answer = answer
            before = os.listdir("/proc/self/fd")
            monkeypatch.setattr(os, "pipe2", open_pipe)
            await caller._answer("start", 7, {"op": "start", "argv": ["x"]})
            assert os.listdir("/proc/self/fd") == before
            host.loop.remove_reader(ours)
            return told

    (told,) = asyncio.run(run())
    assert (told["op"], told["id"], told["kind"]) == ("failed", 7, "SandboxError")
    assert "too many open files" in told["text"]


def test_variables_are_measured_as_they_are_sent() -> None:
    assert check_variables("env", {"X": "a" * 65_000})
    with pytest.raises(InvalidArgument, match="64 KiB"):
        check_variables("env", {"X": "\u4e2d" * 40_000})


@pytest.mark.parametrize(
    "name", ["https://example.com", "example.com/simple", "example.com:443", "a b"]
)
def test_a_network_of_something_else_than_names_is_refused(name: str) -> None:
    """Such a name would match nothing, so each request would be refused."""
    assert SandboxOptions(network=["*.example.com"]).to_wire()["network"] == ["*.example.com"]
    with pytest.raises(InvalidArgument, match="network") as error:
        SandboxOptions(network=[name]).to_wire()
    assert 'use "' in error.value.hint


def test_an_unknown_option_is_named_as_the_user_wrote_it() -> None:
    with pytest.raises(InvalidArgument, match=r"^Sandbox.create has no option mem\n") as error:
        make_options({"mem": "1GB"})
    assert error.value.hint.startswith("did you mean memory?")
