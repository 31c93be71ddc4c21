"""What a page consists of, and functions that several pages share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from cavvy.client import ApiError

_T = TypeVar("_T")
UNFINISHED = ("queued", "starting", "running", "stopping")
ENDED = ("done", "failed", "stopped")


@dataclass(frozen=True)
class Page:
    """A template, and the values that it shows."""

    title: str
    template: str
    values: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True)
class Part(Generic[_T]):
    """A part of a page. `value` is None if the user may not see it; `refusal` says why."""

    value: _T | None
    refusal: str = ""


def try_part(fetch: Callable[[], _T]) -> Part[_T]:
    """Fetch a part of a page. If the server refuses it, the rest of the page is shown. Raises
    ApiError if the server does not answer, or if the user is no longer signed in.
    """
    try:
        return Part(fetch())
    except ApiError as error:
        if error.status not in (403, 404):
            raise
        return Part(None, error.message)
