"""Starts a user's command or remote session in a separate process; the control plane relays a
session's input."""

from __future__ import annotations

import os
import socket
import subprocess

from ..config import AgentConfig
from ..control_client import ControlPlaneClient
from ..documents import ExecConfig
from ..work.reaper import ChildCommand
from .execs import RankExecs


def start_command(
    execs: RankExecs,
    link: ControlPlaneClient,
    asked: ExecConfig,
    command: ChildCommand,
    secrets: list[str],
) -> None:
    """Start a user's command. If the command is attached, the command ends when its user
    disconnects."""
    user = None
    if asked.attached:
        from .inbox import UserPresence

        user = UserPresence(link, asked.id)
    execs.start(command, link.stream(asked.id), secrets, user=user)


def start_session(
    execs: RankExecs,
    link: ControlPlaneClient,
    exec_id: str,
    config: AgentConfig,
    command: ChildCommand,
    *,
    contained: bool,
) -> None:
    """Start a user's session with the folder, environment and mount namespace of `command`. If
    `contained`, the session's commands and paths are inside the container.
    """
    from .inbox import ExecInbox

    ours, theirs = socket.socketpair()
    command.channel = theirs.fileno()
    command.call = lambda channel: serve(command, config, exec_id if contained else "")
    stream = link.stream(exec_id)
    execs.start(command, stream, [], ExecInbox(link, exec_id, ours))
    theirs.close()


def serve(command: ChildCommand, config: AgentConfig, contained: str) -> int:
    """Serve the session; runs in the session's own process. `contained` is the session's ID if its
    commands and paths are inside the container, and otherwise empty."""
    from .session import RemoteSession, SessionTarget

    place = SessionTarget(command.env, command.cwd, lambda: "")
    if contained:
        from ..work.container import find_engine, follow_exec, make_name

        engine = find_engine() or ""
        place = SessionTarget(
            command.env,
            command.cwd,
            lambda: find_root(engine, make_name(config)),
            lambda number: follow_exec(config, f"{contained}-{number}"),
        )
    os.environ.clear()
    os.environ.update(command.env)
    return RemoteSession(command.channel, 1, place).serve()


def find_root(engine: str, container: str) -> str:
    """Return the container's root folder as seen from this node, or "" without a container. Raises
    OSError."""
    if os.path.basename(engine) not in ("podman", "docker"):
        return ""
    command = [engine, "inspect", "--format", "{{.State.Pid}}", container]
    try:
        said = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=True
        ).stdout
        return f"/proc/{int(said)}/root"
    except (subprocess.SubprocessError, ValueError) as error:
        raise OSError(f"cannot access the container's files: {error}") from error
