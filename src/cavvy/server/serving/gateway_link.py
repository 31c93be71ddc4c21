"""A connection to the gateway's control socket. The gateway sends one reply for each line, in the
order of the lines.
"""

import asyncio
from typing import Self

import msgspec

from cavvy.gateway.control_socket import ControlLine, ControlReply

_LINE_MAX = 64 << 20
_decode = msgspec.json.Decoder(ControlReply).decode
_encode = msgspec.json.Encoder().encode


class GatewayLost(Exception):
    """Raised if the gateway does not answer, or refuses a line."""


class GatewayRefused(GatewayLost):
    """Raised if the gateway refuses a line, or if its answer cannot be read, for example because
    another version of Cavvy started the gateway.
    """


class GatewayLink:
    """Only one caller at a time may use the link. A link that has failed is not used again."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, path: str) -> Self:
        """Raises OSError if no gateway listens."""
        return cls(*await asyncio.open_unix_connection(path, limit=_LINE_MAX))

    async def ask(self, line: ControlLine, timeout_s: float | None = 10.0) -> ControlReply:
        """Raises GatewayLost."""
        async with self._turn:
            if self._writer.is_closing():  # an earlier caller found the end of the gateway
                raise GatewayLost("the gateway has ended")
            try:
                async with asyncio.timeout(timeout_s):
                    self._writer.write(_encode(line) + b"\n")
                    await self._writer.drain()
                    told = await self._reader.readline()
            except (OSError, ValueError) as error:  # OSError includes TimeoutError
                self.close()
                raise GatewayLost(str(error) or type(error).__name__) from error
            except asyncio.CancelledError:
                self.close()  # otherwise the reply would be mistaken for that of the next line
                raise
            if not told.endswith(b"\n"):  # the gateway may have been killed in the middle of a line
                self.close()
                raise GatewayLost("the gateway has ended")
        try:
            reply = _decode(told)
        except ValueError as error:
            self.close()
            raise GatewayRefused(f"the gateway's answer cannot be read: {error}") from error
        if reply.error is not None:
            self.close()
            raise GatewayRefused(reply.error)
        return reply

    async def wait_ended(self, timeout_s: float) -> None:
        """Wait until the gateway's process has ended. Raises OSError if the gateway does not end
        in time.
        """
        async with asyncio.timeout(timeout_s):
            await self._reader.read()

    def close(self) -> None:
        self._writer.close()
