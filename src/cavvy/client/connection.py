"""Connects to the server that commands use: the server of the chosen context, or else the embedded
server.
"""

from cavvy.client import embedded
from cavvy.client.client import ApiClient
from cavvy.client.contexts import Context, chosen_context
from cavvy.client.state import default_home
from cavvy.client.transport import Patience


def connect(
    *,
    start: bool = True,
    home: str | None = None,
    timeout_s: float = 30.0,
    patience: Patience | None = None,
) -> ApiClient:
    """Connect to the server of the chosen context (see `contexts.py`). Without a context, or if
    `home` names a state folder, connect to the embedded server. Unless `start` is False, the server
    is started if it is not running. If the server later stops answering, requests are repeated
    until the time limit of `patience`.

    Raises ApiError with the code `context-unknown`, StartFailed, IncompatibleVersions. Raises
    Unreachable if the embedded server is not running and `start` is False.
    """
    context = None if home is not None else chosen_context(default_home())
    if context is not None:
        return open_context(context, timeout_s=timeout_s, patience=patience)
    return embedded.connect(start=start, home=home, timeout_s=timeout_s, patience=patience)


def open_context(
    context: Context, *, timeout_s: float = 30.0, patience: Patience | None = None
) -> ApiClient:
    """Return a client of the context's server. This function sends no request."""
    return ApiClient(
        context.address, context.token, timeout_s=timeout_s, patience=patience, ca=context.ca
    )
