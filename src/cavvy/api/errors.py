"""Every error of the API has a stable code, an HTTP status, a message and a hint that says what to
do.

* ApiProblem        raised by routes; its code is in CODES
  + RetryLater        the same request may succeed later (503, 507)

`translate.py` turns errors of other modules into errors of the API. CODES are the rows of
`errors.csv`; `python -m cavvy.api.errors` also writes `docs/reference/errors.md` from them.
"""

import sys
from collections.abc import Mapping

from msgspec import Struct

from cavvy.catalog.tables import read_table


class ErrorCode(Struct, frozen=True, kw_only=True):
    """One error code: its HTTP status, its meaning, and the hint that its answers contain by
    default."""

    status: int
    meaning: str
    hint: str


CODES: Mapping[str, ErrorCode] = {
    row["code"]: ErrorCode(status=int(row["status"]), meaning=row["meaning"], hint=row["hint"])
    for row in read_table(__package__, "errors")
}


class ApiProblem(Exception):
    """Raised if a request failed. `code` is a key of CODES, and `message` gives the reason."""

    def __init__(
        self, code: str, message: str, hint: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = CODES[code].status
        self.message = message
        self.hint = hint or CODES[code].hint
        self.headers = headers or {}


class RetryLater(ApiProblem):
    """Raised if a request failed, but the same request can succeed later."""

    def __init__(self, code: str, message: str, *, after_s: int = 1) -> None:
        super().__init__(code, message, headers={"Retry-After": str(after_s)})


def reference() -> str:
    """Return the text of docs/reference/errors.md."""
    lines = [
        "# Error codes",
        "",
        "Written by `python -m cavvy.api.errors > docs/reference/errors.md`; do not edit.",
        "",
        "Every error of the API has the same form; `code` never changes its meaning, `message` is "
        "for people:",
        "",
        "```json",
        '{"code": "job-not-found", "message": "project default has no job x", "hint": "..."}',
        "```",
        "",
        "| code | status | meaning | what to do |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {code.status} | {code.meaning} | {code.hint} |"
        for name, code in sorted(CODES.items())
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
