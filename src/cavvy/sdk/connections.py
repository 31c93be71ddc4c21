"""The connections of a client to its server. Each request uses a connection that no other thread is
using."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cavvy import __version__
from cavvy.client import API, ApiClient, ApiError, Patience, connect
from cavvy.client.addresses import check_address
from cavvy.client.state import default_home
from cavvy.client.usual_project import find_chosen, find_own
from cavvy.sdk.errors import CavvyError, public_errors

# how many seconds a request is repeated while no server answers; the commands use the same value
_PATIENCE_S = 120.0
_LOG = logging.getLogger("cavvy")


class Connections:
    """The open connections to the server at `address`. If `address` is None, the connections lead
    to the server that commands use: the server of the chosen context, or the embedded server of the
    state folder `home`. The first connection is opened at the first request.
    """

    def __init__(self, address: str | None, token: str | None, home: str | None) -> None:
        if address is not None:
            if not token:
                raise CavvyError(
                    f"no token for {address}",
                    "pass token=...; `cavvy server token create` creates one",
                )
            with public_errors():
                check_address(address)
        elif token is not None:
            hint = "pass the address of the server, or omit the token for the embedded server"
            raise CavvyError("`token` was given without `address`", hint)
        self.address = address
        self._token = token or ""
        self._home = home
        self._lock, self._process = threading.Lock(), os.getpid()
        self._first: ApiClient | None = None
        self._idle: list[ApiClient] = []
        self._closed = False
        self._project: str | None = None

    @contextmanager
    def use(self) -> Iterator[ApiClient]:
        """Yield a connection for requests of one thread. Errors of the transport are raised as
        CavvyError. A connection is closed if its request was interrupted, because the answer to
        that request could arrive later and be mistaken for the answer to the next request.
        """
        with public_errors():
            connection = self._take()
            whole = False
            try:
                yield connection
                whole = True
            except (GeneratorExit, ApiError):  # no request is waiting for its answer
                whole = True
                raise
            finally:
                self._give_back(connection, whole)

    def default_project(self) -> str:
        """Return the project of a request that names none: CAVVY_PROJECT, or the one that `cavvy
        project use` chose for this server, or the caller's own. Raises CavvyError.
        """
        if named := os.environ.get("CAVVY_PROJECT"):
            return named
        if self._project is None:
            with self.use() as connection:
                chosen = "" if self.address or self._home else find_chosen(default_home())
                self._project = chosen or find_own(connection)
        return self._project

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for each in idle:
            each.close()

    def __del__(self) -> None:
        for each in getattr(self, "_idle", ()):  # users of notebooks rarely close their clients
            each.close()

    def _take(self) -> ApiClient:
        if self._process != os.getpid():
            # This process is a fork. Two processes must not use one connection, and a thread that
            # held the lock does not exist here.
            self._lock, self._process, self._idle = threading.Lock(), os.getpid(), []
        with self._lock:
            if self._closed:
                raise CavvyError("the client is closed", "make a new Client()")
            if self._first is None:
                self._first = self._open()
                return self._first
            return self._idle.pop() if self._idle else self._first.sibling()

    def _give_back(self, connection: ApiClient, whole: bool) -> None:
        with self._lock:
            keep = whole and not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def _open(self) -> ApiClient:
        patience = Patience(_PATIENCE_S, _LOG.warning)
        if self.address is None:
            return connect(home=self._home, patience=patience)
        # report a wrong address at once instead of waiting for a server there
        patience.limit_s = 0.0
        client = ApiClient(self.address, self._token, patience=patience)
        _check_version(client)
        patience.limit_s = _PATIENCE_S
        return client


def _check_version(client: ApiClient) -> None:
    """Send a request to check the client's address and token. Raises ApiError. Raises CavvyError if
    the server has a different version of the API.
    """
    server = client.server()
    if server.api != API:
        raise CavvyError(
            f"the server at {client.address} has version {server.api} of the API (cavvy "
            f"{server.version}), and this client has version {API} (cavvy {__version__})",
            "install the server's version of cavvy",
        )
