"""Converts between a service's key on the worklist and the key of the service's queue of calls."""

_PREFIX = "calls:"


def calls_key(service_key: str) -> str:
    """Return the worklist's key of the service's queue."""
    return f"{_PREFIX}{service_key}"


def is_calls_key(key: str) -> bool:
    return key.startswith(_PREFIX)


def service_of_calls(key: str) -> str:
    """Return a service's key in the worklist, given the key of the service's queue of calls."""
    return key.removeprefix(_PREFIX)
