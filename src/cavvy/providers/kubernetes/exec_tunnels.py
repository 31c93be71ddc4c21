"""Relays the agents' requests to the control plane. An exec command in each pod connects the pod's
first process to the control plane, through the API server.
"""

import asyncio
import struct
from contextlib import suppress
from pathlib import Path

from cavvy.providers.base import ProviderError, Refused
from cavvy.providers.batch.login_session import connect_to
from cavvy.providers.hosts.bundles import pack_python, platform
from cavvy.providers.kubernetes.api import ApiServerRefused, KubernetesApi
from cavvy.providers.kubernetes.pods import CONTAINER
from cavvy.providers.kubernetes.wire import ConnectionBroken, WebSocket

_FRAME = struct.Struct("!cII")
_OPEN, _DATA, _CLOSE, _REMOVED = b"O", b"D", b"C", b"R"
_CHUNK = 64 * 1024
# A kubelet needs at least 0.3 s to mount the volumes of a new pod. Earlier attempts to connect
# would slow the kubelet down.
_BEFORE_S = 0.35
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.08, 1.0
_FAREWELL_S = 0.5
_OUTPUT, _ERRORS, _STATUS = 1, 2, 3
_COMMAND = "/cavvy/agent/tunnel.sh"


class ExecTunnels:
    """The tunnels to the pods of one context. A broken tunnel is opened again until `let_go` is
    called for its pod.
    """

    def __init__(self, api: KubernetesApi, server: str, cache: Path) -> None:
        self._api = api
        self._server = server
        self._cache = cache
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tunnels: dict[str, _Tunnel] = {}
        self._wake: dict[str, asyncio.Event] = {}
        # pod -> the reason why its agent cannot be reached, to show to users
        self.problems: dict[str, str] = {}

    def follow(self, pod: str, *, runs: bool) -> None:
        """Keep a tunnel to this pod open. If the pod is known to run, try to open the tunnel
        immediately.
        """
        if pod not in self._tasks:
            self._wake[pod] = asyncio.Event()
            self._tasks[pod] = asyncio.create_task(self._keep(pod))
        if runs:
            self._wake[pod].set()

    def let_go(self, pod: str) -> None:
        task = self._tasks.pop(pod, None)
        self._wake.pop(pod, None)
        self.problems.pop(pod, None)
        if task is not None:
            task.cancel()

    async def tell_removed(self, pod: str) -> None:
        """Notify a pod that Cavvy is removing it, so that the pod's agent does not report SIGTERM
        as a preemption.
        """
        tunnel = self._tunnels.get(pod)
        if tunnel is not None:
            with suppress(TimeoutError, ConnectionBroken):
                async with asyncio.timeout(_FAREWELL_S):
                    await tunnel.send(_REMOVED, 0)
                    await tunnel.told.wait()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for pod in list(self._tasks):
            self.let_go(pod)
        if tasks:
            await asyncio.wait(tasks)

    async def _keep(self, pod: str) -> None:
        await self._pause(pod, _BEFORE_S)
        pause = _FIRST_PAUSE_S
        while True:
            try:
                needs = await self._join(pod)
                if needs:
                    await self._bring_python(pod, needs)
                    continue
            except ApiServerRefused as error:
                if error.status == 404:
                    return  # the pod no longer exists
                self.problems[pod] = str(error)
            except Refused as error:
                self.problems[pod] = str(error)
                pause = _LAST_PAUSE_S
            except (ProviderError, ConnectionBroken, OSError) as error:
                self.problems[pod] = str(error)
            woken = await self._pause(pod, pause)
            pause = _FIRST_PAUSE_S if woken else min(_LAST_PAUSE_S, pause * 1.1)

    async def _pause(self, pod: str, seconds: float) -> bool:
        """Wait for `seconds`, or until `follow` reports that the pod runs. Return True if the pod
        runs.
        """
        wake = self._wake[pod]
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await wake.wait()
        woken = wake.is_set()
        wake.clear()
        return woken

    async def _join(self, pod: str) -> str:
        """Relay requests until the tunnel ends. Return the pod's platform if the pod first needs a
        Python runtime, else "".
        """
        async with self._api.run(pod, CONTAINER, ["sh", _COMMAND]) as stream:
            tunnel = _Tunnel(stream, self._server)
            self._tunnels[pod] = tunnel
            self.problems.pop(pod, None)
            try:
                return await tunnel.relay()
            finally:
                if self._tunnels.get(pod) is tunnel:
                    del self._tunnels[pod]
                await tunnel.close()

    async def _bring_python(self, pod: str, host: str) -> None:
        if host != platform():
            raise Refused(
                "the pod's image has no python3 (3.8 or newer), and the server's Python cannot be "
                f"copied into the pod, because this Python is for {platform()}, not {host}"
            )
        bundle = await asyncio.to_thread(pack_python, self._cache)
        async with self._api.run(
            pod, CONTAINER, ["sh", _COMMAND, str(len(bundle.content))]
        ) as stream:
            sending = asyncio.create_task(_send_all(stream, bundle.content))
            try:
                said = b""
                while (message := await stream.receive()) is not None:
                    said += message[1] if message[0] in (_ERRORS, _STATUS) else b""
                    if message[0] == _STATUS and b'"Success"' not in message[1]:
                        raise Refused(
                            "Python could not be copied into the pod: "
                            f"{said.decode(errors='replace')[:500]}"
                        )
            finally:
                sending.cancel()
                await asyncio.wait([sending])


async def _send_all(stream: WebSocket, content: bytes) -> None:
    for start in range(0, len(content), _CHUNK):
        await stream.send(0, content[start : start + _CHUNK])


class _Tunnel:
    """One open tunnel to a pod."""

    def __init__(self, stream: WebSocket, server: str) -> None:
        self._stream = stream
        self._server = server
        self._connections: dict[int, asyncio.StreamWriter] = {}
        self._early: dict[int, asyncio.Queue[bytes | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.told = asyncio.Event()

    async def send(self, kind: bytes, number: int, body: bytes = b"") -> None:
        await self._stream.send(0, _FRAME.pack(kind, number, len(body)) + body)

    async def relay(self) -> str:
        """Relay the requests of the agent's connections until the tunnel ends. Return the pod's
        platform if the pod requested a Python runtime, else "". Raises ConnectionBroken.
        """
        unread, said = b"", b""
        while (message := await self._stream.receive()) is not None:
            channel, data = message
            if channel == _OUTPUT:
                unread += data
                if unread.startswith(b"needs-python"):
                    continue
                unread = self._read(unread)
            elif channel in (_ERRORS, _STATUS):
                said += data
        if unread.startswith(b"needs-python"):
            return unread.decode(errors="replace").partition(" ")[2].strip()
        raise ConnectionBroken(f"the tunnel ended: {said.decode(errors='replace').strip()[-300:]}")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _read(self, unread: bytes) -> bytes:
        while len(unread) >= _FRAME.size:
            kind, number, length = _FRAME.unpack_from(unread)
            if len(unread) < _FRAME.size + length:
                break
            body, unread = (
                unread[_FRAME.size : _FRAME.size + length],
                unread[_FRAME.size + length :],
            )
            if kind == _OPEN:
                queue = self._early[number] = asyncio.Queue()
                task = asyncio.create_task(self._serve(number, queue))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif kind == _DATA and number in self._early:
                self._early[number].put_nowait(body)
            elif kind == _CLOSE and number in self._early:
                self._early[number].put_nowait(None)
            elif kind == _REMOVED:
                self.told.set()
        return unread

    async def _serve(self, number: int, queue: asyncio.Queue[bytes | None]) -> None:
        """Relay one connection from an agent."""
        try:
            reader, writer = await connect_to(self._server)
        except OSError:
            await self._hang_up(number)
            return
        answers = asyncio.create_task(self._answer(number, reader))
        try:
            while (data := await queue.get()) is not None:
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self._early.pop(number, None)
            answers.cancel()
            writer.close()
            await asyncio.wait([answers])

    async def _answer(self, number: int, reader: asyncio.StreamReader) -> None:
        with suppress(OSError, ConnectionBroken):
            while data := await reader.read(_CHUNK):
                await self.send(_DATA, number, data)
        await self._hang_up(number)

    async def _hang_up(self, number: int) -> None:
        with suppress(ConnectionBroken):
            await self.send(_CLOSE, number)
        if number in self._early:
            self._early[number].put_nowait(None)
