"""Links to hosts: what `ssh` prints becomes the right error, and a program on this machine is
spoken to as one on a host is.
"""

import asyncio
import sys
from pathlib import Path

import pytest

from cavvy.providers.base import NoCapacity, Refused
from cavvy.providers.hosts.connection import (
    CannotConnect,
    HostAddress,
    HostUnknown,
    LoginRefused,
    explain,
    open_connection,
)
from cavvy.providers.hosts.remote_calls import LinkLost, RemoteCalls

ECHO = "import sys; [(sys.stdout.write(line), sys.stdout.flush()) for line in sys.stdin]"


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (
            "No ED25519 host key is known for h. Host key verification failed.",
            LoginRefused,
            "not in known_hosts",
        ),
        ("ann@h: Permission denied (publickey).", LoginRefused, "ssh-copy-id"),
        ("/c: line 3: Bad configuration option: nonsense", LoginRefused, "line 3"),
        (
            "ssh: Could not resolve hostname h: Name or service not known",
            HostUnknown,
            "the name has no address (Name or service not known)",
        ),
        ("ssh: connect to host h port 22: No route to host", CannotConnect, "No route to host"),
        ("", CannotConnect, "the connection was closed"),
    ],
)
def test_what_ssh_prints_says_what_to_do(said: str, kind: type[Exception], words: str) -> None:
    error = explain(HostAddress(name="h"), said)
    assert type(error) is kind
    assert words in str(error)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Host key verification failed.", "the host key differs from the recorded key"),
        ("root@h: Permission denied (publickey).", "the host does not accept this server's key"),
    ],
)
def test_a_machine_that_cavvy_started_needs_no_hint_for_the_users_own_ssh(
    said: str, words: str
) -> None:
    error = explain(HostAddress(name="h", ours=True), said)
    assert isinstance(error, LoginRefused)
    assert str(error) == f"h: {words} ({said})"


async def test_a_program_here_is_spoken_to_in_frames() -> None:
    link = await open_connection(HostAddress(name="here"), timeout_s=60)
    link.start([sys.executable, "-I", "-S", "-c", ECHO])
    link.send({"id": 1, "text": "a\nb"})
    async for head, data in link.frames():
        assert (head, data) == ({"id": 1, "text": "a\nb"}, b"")
        link.close()
    await link.closed()
    assert link.exit_code == -9


async def test_a_program_that_is_not_there_is_known_by_its_exit_code(tmp_path: Path) -> None:
    link = await open_connection(HostAddress(name="here"), timeout_s=60)
    link.start([str(tmp_path / "python")])
    assert [frame async for frame in link.frames()] == []
    await link.closed()
    assert link.exit_code == 127
    with pytest.raises(Refused, match="cannot be started on this machine"):
        await open_connection(HostAddress(name="h", ssh=[str(tmp_path / "ssh")]), timeout_s=60)


def test_a_machine_without_ssh_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="install the package openssh-client"):
        asyncio.run(open_connection(HostAddress(name="h", ssh=["ssh"]), timeout_s=60))


def test_a_shell_that_prints_without_line_breaks_is_not_read_for_ever(tmp_path: Path) -> None:
    script = tmp_path / "ssh"
    script.write_text("head -c 200000 /dev/zero | tr '\\0' x\n")
    address = HostAddress(name="h", ssh=["sh", str(script)], destination="h")
    with pytest.raises(CannotConnect, match="h: the login shell prints a line of more than 64 KiB"):
        asyncio.run(open_connection(address, timeout_s=60))


def test_a_null_byte_in_a_command_is_refused() -> None:
    with pytest.raises(Refused, match="embedded null byte"):
        asyncio.run(open_connection(HostAddress(name="h", ssh=["ss\0h"]), timeout_s=60))


async def test_answers_reach_the_request_with_their_number() -> None:
    calls = RemoteCalls("h")

    def ask(do: str) -> asyncio.Task[int]:
        return asyncio.create_task(calls.ask(sent.append, do, int, timeout_s=60))

    sent: list[dict[str, object]] = []
    first, second, third = ask("first"), ask("second"), ask("third")
    while len(sent) < 3:
        await asyncio.sleep(0)
    calls.take({"id": sent[1]["id"], "error": "in use", "kind": "busy"})
    calls.take({"id": sent[0]["id"], "answer": 7})
    calls.take({"id": 99, "answer": 8})  # nothing waits for it
    calls.give_up()
    assert await first == 7
    with pytest.raises(NoCapacity, match="h: in use"):
        await second
    with pytest.raises(LinkLost, match="h: the connection was lost"):
        await third
