"""Writes docs/reference/api.md, which explains how to use the API and lists every route (`python -m
cavvy.api.reference`).
"""

import sys
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from cavvy.api.app import list_routes
from cavvy.api.openapi import describe

_INTRODUCTION = """\
# HTTP API

Read this page when a program that is not written in Python should use Cavvy: it lists every route.

Routes written by `python -m cavvy.api.reference > docs/reference/api.md`; do not edit.

The embedded server serves HTTP/1.1 over the Unix socket `server.sock` in the state folder
(`~/.cavvy` or `CAVVY_HOME`; `server.json` contains the path), and over TCP if
`server.listen` is set. `/v1/openapi.json` describes all routes and their schemas in OpenAPI 3.1.

```sh
curl --unix-socket ~/.cavvy/server.sock -H "Authorization: Bearer $(cat ~/.cavvy/token)" \\
     http://cavvy/v1/projects/default/jobs?limit=10
```

* **Authentication.** Every route except `/v1/health` and the files that are named by their hash
  requires `Authorization: Bearer TOKEN`. Users' routes require the token of an account, or the
  token in the file `token` of the state folder, which only its owner can read. Agents' routes
  require the token of a gang, which is valid only for that gang. Neither token is valid for the
  other routes.
* **Permissions.** The table shows the permission that each route needs, and where: in the project
  of the path, of the parameter or of the body, or on the installation. Without a role in a project,
  the answer is the same as for a project that does not exist. See
  [sharing a server](../guides/team.md).
* **Versions.** Changes to `/v1` only add fields and routes; `api` and `revision` of `/v1/server`
  give the current version. Clients ignore fields that they do not know; the server refuses a
  request with a field that it does not know.
* **Errors** have one form and stable codes: see [errors](errors.md).
* **Idempotent submission.** An `Idempotency-Key` becomes the job's id. It has 16 characters of
  Crockford's base 32 in lower case: the first ten encode the time in milliseconds since 1970, and
  the rest are random. Repeated requests with the same key create one job, even across a restart of
  the server; `created` states whether this request created the job. Each request without a key
  creates a new job.
* **Lists** are newest first. Send a page's `cursor` as `?cursor=` to get the next page; null marks
  the last page.
* **Long polling.** `wait_s` on events, logs and commands delays the answer, at most 60 s, until
  there is something new. The log's headers `Cavvy-Log-Attempt` and `Cavvy-Log-Offset` are the
  parameters of the next request; `Cavvy-Log-Over: true` marks the end of the log.
* **Units.** Money is in micro-US-dollars (`_micros`), durations in seconds (`_s`), times in UTC as
  ISO 8601, memory
  in MiB.

## Routes

| method | path | permission | what |
|---|---|---|---|
"""


def reference() -> str:
    """Return the text of docs/reference/api.md."""
    app = FastAPI(title="Cavvy")
    app.router.routes.extend(route for route, _ in list_routes())
    rows = [
        f"| {method.upper()} | `{path}` | {_permission(operation)} | {operation['summary']} |"
        for path, operations in describe(app)["paths"].items()
        for method, operation in operations.items()
    ]
    return _INTRODUCTION + "\n".join(rows) + "\n"


def _permission(operation: Mapping[str, Any]) -> str:
    rule = operation["x-cavvy-rule"]
    if "permission" in rule:
        return f"`{rule['permission']}`, {rule['project']}"
    return {"gang": "token of the gang", "machine": "token of the machine", "open": "none"}.get(
        rule["project"], "any account"
    )


if __name__ == "__main__":
    sys.stdout.write(reference())
