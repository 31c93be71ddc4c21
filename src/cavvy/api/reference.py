"""Writes docs/reference/api.md: how the API is used, and every route (`python -m
cavvy.api.reference`).
"""

import sys

from fastapi import FastAPI

from cavvy.api.app import add_routes
from cavvy.api.openapi import describe

_INTRODUCTION = """\
# HTTP API

Routes written by `python -m cavvy.api.reference > docs/reference/api.md`; do not edit.

The embedded server speaks HTTP/1.1 over the Unix socket `server.sock` in the state folder (`~/.cavvy` or
`CAVVY_HOME`; `server.json` says where it is), and over loopback TCP where `server.listen` says so. The whole
description in OpenAPI 3.1, with every schema, is at `/v1/openapi.json`.

```sh
curl --unix-socket ~/.cavvy/server.sock -H "Authorization: Bearer $(cat ~/.cavvy/token)" \\
     http://cavvy/v1/projects/default/jobs?limit=10
```

* **Who may ask.** Every route but `/v1/health` wants `Authorization: Bearer TOKEN`. Users' routes take the token in the
  file `token` of the state folder, which only its owner can read. The agents' routes take the token of a gang, which is
  good for that gang only. Neither opens the other's routes.
* **Versions.** `/v1` changes only by additions; `api` and `revision` of `/v1/server` say which. Clients ignore fields
  that they do not know; a request with a field that the server does not know is refused.
* **Errors** have one form and stable codes: see [errors](errors.md).
* **Submitting once.** An `Idempotency-Key` proposes the job's id: 16 characters of Crockford's base 32 in lower case,
  the first ten the time in milliseconds since 1970, the rest random. However often it is sent, also over a restart of
  the server, the same key makes one job; `created` says whether this request made it. Without a key every request
  makes one.
* **Lists** are newest first. `cursor` of a page, sent as `?cursor=`, asks for the next one; null is the last.
* **Waiting for news.** `wait_s` on events, logs and commands makes the answer wait, at most 60 s, until there is
  something new. The log's headers `Cavvy-Log-Attempt` and `Cavvy-Log-Offset` are what to send with the next request;
  `Cavvy-Log-Over: true` says that nothing will follow.
* **Units.** Money is in micro-US-dollars (`_micros`), lengths are in seconds (`_s`), times in UTC as ISO 8601, memory
  in MiB.

## Routes

| method | path | what |
|---|---|---|
"""


def reference() -> str:
    """The page's text."""
    app = FastAPI(title="Cavvy")
    add_routes(app)
    rows = [
        f"| {method.upper()} | `{path}` | {operation['summary']} |"
        for path, operations in describe(app)["paths"].items()
        for method, operation in operations.items()
    ]
    return _INTRODUCTION + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
