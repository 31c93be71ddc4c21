"""Sends numbered requests to a program on another machine, and matches answers to requests."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import msgspec

from cavvy.domain.values import Struct
from cavvy.providers.base import NoCapacity, Refused, TryAgain

_T = TypeVar("_T")
_ERRORS: dict[str, type[Exception]] = {"busy": NoCapacity, "refused": Refused}


class EmptyAnswer(Struct, frozen=True):
    """The decoded form of an empty answer."""


class LinkLost(TryAgain):
    """Raised if the link broke after a request was sent; the host may have executed the request."""


class RemoteCalls:
    """The requests that wait for an answer. `name` is the prefix of every error message. `up` is
    called each second; if it returns False, the link is down and waiting requests fail.
    """

    def __init__(self, name: str = "", up: Callable[[], bool] = lambda: True) -> None:
        self._up = up
        self._prefix = f"{name}: " if name else ""
        self._waiting: dict[int, asyncio.Future[object]] = {}
        self._numbers = count(1)

    async def ask(
        self,
        send: Callable[[dict[str, Any]], None],
        do: str,
        kind: type[_T],
        *,
        timeout_s: float,
        **fields: object,
    ) -> _T:
        """Send a request and return the answer. Raises LinkLost if the link breaks, or the error
        with which the program answered: TryAgain, NoCapacity or Refused.
        """
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            send({"id": number, "do": do, **msgspec.to_builtins(fields)})
            async with asyncio.timeout(timeout_s):
                while not (await asyncio.wait([future], timeout=1))[0]:
                    if not self._up():
                        raise TimeoutError
            return msgspec.convert(future.result(), kind)
        except (TimeoutError, OSError) as error:
            raise LinkLost(
                f"{self._prefix}the connection was lost before the answer arrived"
            ) from error
        finally:
            self._waiting.pop(number, None)

    def take(self, head: dict[str, Any]) -> None:
        """Pass an answer to the request with the same number."""
        future = self._waiting.pop(head.get("id", -1), None)
        if future is None or future.done():
            return
        if "answer" in head:
            future.set_result(head["answer"])
            return
        error = _ERRORS.get(head.get("kind", ""), TryAgain)
        future.set_exception(error(f"{self._prefix}{head.get('error', '')}"))

    def give_up(self, error: Exception | None = None) -> None:
        """Fail all waiting requests, because the link is lost."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(
                    error
                    or LinkLost(f"{self._prefix}the connection was lost before the answer arrived")
                )
                future.exception()  # mark the error as retrieved, in case the caller was cancelled
        self._waiting.clear()
