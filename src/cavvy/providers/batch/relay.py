"""Relays the agents' mail. Each letter is a file with a request to the control plane, and the relay
writes the answer to another file.
"""

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

from cavvy.providers.base import ProviderError, TryAgain
from cavvy.providers.batch.login_session import LoginSession, MailLetter

# seconds to wait for an answer; longer than an agent's longest poll (30 s) and than the minute
# after which agents repeat a request
_ANSWER_S = 120.0
_ROUTES = (b"GET /agent/v1/", b"POST /agent/v1/", b"PUT /agent/v1/")
_AT_ONCE = 256  # maximum number of concurrent requests, most of which are long polls


async def relay_mail(login_session: LoginSession, folder: str, server: str) -> None:
    """Relay requests until cancelled, or until the connection to the login node breaks. Raises
    TryAgain, Refused.
    """
    room = asyncio.Semaphore(_AT_ONCE)
    async with login_session.mail(folder) as letters:
        try:
            async with asyncio.TaskGroup() as group:
                while (letter := await letters.get()) is not None:
                    await room.acquire()
                    group.create_task(_relay(login_session, letter, server, room))
                raise TryAgain("the connection to the login node broke")
        except* ProviderError as errors:
            raise errors.exceptions[0] from None


async def _relay(
    login_session: LoginSession, letter: MailLetter, server: str, room: asyncio.Semaphore
) -> None:
    try:
        answer = await ask(server, letter.data)
        # an error is ignored, because the agent repeats its request; `read` notices a lost
        # connection
        with suppress(ProviderError):
            await login_session.reply(letter, answer)
    finally:
        room.release()


async def ask(server: str, request: bytes) -> bytes:
    """Forward one request unchanged and return the answer. Return the status 404 for a route that
    agents do not use, and 502 if the control plane cannot be reached.
    """
    if not request.startswith(_ROUTES):
        return _made("404 Not Found")  # letters may use only the agents' routes
    line, _, rest = request.partition(b"\r\n")
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await connect_to(server)
            try:
                writer.write(line + b"\r\nConnection: close\r\n" + rest)
                await writer.drain()
                return await reader.read() or _made("502 Bad Gateway")
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return _made("502 Bad Gateway")


async def connect_to(server: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if server.startswith("unix:"):
        return await asyncio.open_unix_connection(server.removeprefix("unix:"))
    url = urlsplit(server)
    tls = url.scheme == "https"
    return await asyncio.open_connection(
        url.hostname, url.port or (443 if tls else 80), ssl=tls or None
    )


def _made(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()
