"""Ends a sandbox through the connection of a client, wherever its host runs."""

import asyncio

from cavvy.capabilities.functions.frames import CallFrames, pack
from cavvy.capabilities.sandboxes.hosts import BRIDGE
from cavvy.client import ApiClient, ApiError
from cavvy.client.tunnel import NodeTunnel, RemoteError, TunnelLost, open_by_api

_ANSWER_S = 30.0


def end_sandbox(client: ApiClient, project: str, sandbox: str) -> None:
    """End a sandbox, given by its ID, with its programs and files. Nothing happens if it has ended.
    Raises ApiError."""
    job, _, name = sandbox.removeprefix("sb-").rpartition("-")
    try:
        asyncio.run(_ask_host(client, project, job, name))
    except (TunnelLost, RemoteError, TimeoutError) as error:
        why = str(error) or f"no answer within {_ANSWER_S:g} s"
        told = f"the host of the sandbox {sandbox} cannot be reached: {why}"
        raise ApiError("node-unreachable", told, status=409) from error


async def _ask_host(client: ApiClient, project: str, job: str, name: str) -> None:
    client.job(project, job)  # else there is no such host, or it is another project's
    carrier = open_by_api(client, project, job, 0, "sandboxes")
    async with asyncio.timeout(_ANSWER_S), NodeTunnel(carrier) as tunnel:
        channel = await tunnel.run(argv=["python3", BRIDGE])
        await channel.write(pack({"op": "terminate", "id": 1, "sandbox": name}))
        frames = CallFrames()
        while (piece := await channel.read()) is not None:
            for head, _ in frames.feed(piece[1]):
                if head["op"] == "reply" or head.get("kind") == "SandboxNotFound":
                    return
                raise TunnelLost(str(head.get("text")))
        raise TunnelLost("it has ended the connection")
