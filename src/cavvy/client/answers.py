"""Recognises errors in answers, and answers that did not come from a server of Cavvy: a proxy in
front of the server, a sign-in page or another program may answer in its place.
"""

import re
from typing import TypeVar

from msgspec.json import decode

from cavvy.client import wire
from cavvy.client.errors import ApiError
from cavvy.client.transport import HttpAnswer

_T = TypeVar("_T")
_TITLE = re.compile(rb"(?is)<title[^>]*>(.*?)</title>")
_LONGEST = 200  # bytes of an answer that a message may contain
_HINT = (
    "check the server's address (`cavvy context list`), and the proxy if one is in front of the "
    "server"
)
_SIZE_HINT = (
    "raise the limit of the proxy in front of the server, for example nginx's "
    "`client_max_body_size`"
)


def find_error(answer: HttpAnswer) -> ApiError | None:
    """Return the error that an answer states, or None if the answer is not an error."""
    if answer.status >= 400:
        try:
            body = decode(answer.body, type=wire.ErrorBody)
        except ValueError:
            return _describe_stranger(answer)
        return ApiError(body.code, body.message, body.hint, answer.status)
    if answer.status >= 300 or _is_page(answer):  # the API has no redirects and no pages
        return _describe_stranger(answer)
    return None


def read_answer(answer: HttpAnswer, kind: type[_T]) -> _T:
    """Decode the body of an answer. Raises ApiError if it is not what the API would answer."""
    try:
        return decode(answer.body, type=kind)
    except ValueError as error:
        message = f"the answer is not one of a server of Cavvy: {error}"
        raise ApiError("answer-unknown", message, _HINT, answer.status) from error


def _is_page(answer: HttpAnswer) -> bool:
    return answer.headers.get("content-type", "").lower().startswith("text/html")


def _describe_stranger(answer: HttpAnswer) -> ApiError:
    status = _name_status(answer.status)
    message = f"another program answered instead of the server: {status}"
    if where := answer.headers.get("location", ""):
        message += f", a redirect to {_clean(where)}"
    elif (text := _find_text(answer)) and text != status:
        message += f", {text!r}"
    hint = _SIZE_HINT if answer.status == 413 else _HINT
    return ApiError(f"http-{answer.status}", message, hint, answer.status)


def _name_status(status: int) -> str:
    from http import HTTPStatus  # here, because few commands need it

    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _find_text(answer: HttpAnswer) -> str:
    """Return the title of a page, or the beginning of another text."""
    title = _TITLE.search(answer.body)
    found = title[1] if title else b"" if _is_page(answer) else answer.body
    return _clean(found[:_LONGEST].decode("utf-8", "replace"))


def _clean(text: str) -> str:
    """Return the text in one line, without control characters."""
    printable = "".join(each if each.isprintable() else " " for each in text[:_LONGEST])
    return " ".join(printable.split())
