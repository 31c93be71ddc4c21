"""Every error of the API: a stable code, an HTTP status, a message and a hint that says what to
do.

* ApiProblem        raised by routes; its code is in CODES
  + RetryLater        the same request may succeed later (503, 507)

`translate.py` turns errors of other modules into these. `docs/reference/errors.md` is
written from CODES (`python -m cavvy.api.errors`).
"""

import sys
from collections.abc import Mapping

from msgspec import Struct


class ErrorCode(Struct, frozen=True, kw_only=True):
    """One code: its status, when it happens and what to do; `hint` is the default of the
    answer's hint.
    """

    status: int
    meaning: str
    hint: str


CODES: Mapping[str, ErrorCode] = {
    "invalid-request": ErrorCode(
        status=422,
        meaning="A parameter or the body is invalid.",
        hint="compare the request with /v1/openapi.json",
    ),
    "invalid-task": ErrorCode(
        status=422,
        meaning="The task file is wrong; the message names every problem with its line.",
        hint="correct the file; `cavvy validate FILE` checks it again",
    ),
    "task-refused": ErrorCode(
        status=422,
        meaning="The task asks for a feature that no enabled provider supports.",
        hint="the message names the fields; `cavvy plan FILE` shows what would fit",
    ),
    "no-offer": ErrorCode(
        status=422,
        meaning="No offer of an enabled provider can ever run the task.",
        hint="the message says what to change; `cavvy plan FILE` shows the nearest misses",
    ),
    "consent-needed": ErrorCode(
        status=402,
        meaning="The task can only run on offers that cost money, and the submission does not "
        "consent to that.",
        hint="submit with --yes, or set limits.budget in the task",
    ),
    "secret-missing": ErrorCode(
        status=422,
        meaning="The task names a secret that its project does not have.",
        hint="set it with `cavvy secret set NAME`",
    ),
    "snapshot-missing": ErrorCode(
        status=409,
        meaning="Files of the frozen working folder have not been uploaded.",
        hint="upload the blobs first; `cavvy run` does so",
    ),
    "blob-mismatch": ErrorCode(
        status=422,
        meaning="The uploaded bytes do not have the hash that names them; a file changed during "
        "the upload.",
        hint="submit again while the folder is still",
    ),
    "unauthorised": ErrorCode(
        status=401,
        meaning="The token is missing or is not this server's.",
        hint="send `Authorization: Bearer TOKEN`; the token is in the file `token` of the state "
        "folder",
    ),
    "forbidden": ErrorCode(
        status=403,
        meaning="The token is good, but not for this route or gang.",
        hint="agents use /agent/v1 for their own gang only, users everything else",
    ),
    "not-found": ErrorCode(
        status=404, meaning="There is no such route.", hint="see /v1/openapi.json"
    ),
    "wrong-method": ErrorCode(
        status=405, meaning="The route does not take this method.", hint="see /v1/openapi.json"
    ),
    "job-not-found": ErrorCode(
        status=404,
        meaning="The project has no job of this name or id.",
        hint="`cavvy ps` lists the jobs of all projects; -p names another project",
    ),
    "exec-not-found": ErrorCode(
        status=404,
        meaning="No such command runs. A restart of the server ends the commands that run beside "
        "jobs.",
        hint="start it again",
    ),
    "secret-not-found": ErrorCode(
        status=404,
        meaning="The project has no secret of this name.",
        hint="`cavvy secret list` shows them",
    ),
    "blob-not-found": ErrorCode(
        status=404,
        meaning="The server has no such part of a working folder.",
        hint="upload it first",
    ),
    "log-not-found": ErrorCode(
        status=404,
        meaning="There is no such attempt or rank.",
        hint="`cavvy status NAME` lists its attempts and nodes",
    ),
    "gang-not-found": ErrorCode(
        status=410, meaning="The server does not know this gang.", hint="stop and leave"
    ),
    "conflict": ErrorCode(
        status=409,
        meaning="Another request changed the same thing at that moment.",
        hint="read it again, then repeat the request",
    ),
    "no-joining": ErrorCode(
        status=409,
        meaning="Machines cannot join here: no provider that accepts them is enabled, or they "
        "cannot reach the server.",
        hint="set the two settings that docs/guides/join.md names, then `cavvy server restart`",
    ),
    "join-refused": ErrorCode(
        status=422,
        meaning="This machine cannot be invited.",
        hint="the message says what to change",
    ),
    "machine-not-found": ErrorCode(
        status=404,
        meaning="No machine of this name has joined.",
        hint="`cavvy machines` lists them",
    ),
    "job-not-running": ErrorCode(
        status=409,
        meaning="The job has no running nodes.",
        hint="`cavvy status NAME` says how its nodes are",
    ),
    "output-waits": ErrorCode(
        status=503,
        meaning="A user's session on a node has not read its earlier output.",
        hint="send it again later",
    ),
    "job-not-ended": ErrorCode(
        status=409,
        meaning="The job has not ended.",
        hint="wait for it, or stop it with `cavvy stop NAME`",
    ),
    "job-done": ErrorCode(
        status=409,
        meaning="The job succeeded.",
        hint="run it again as a new job with `cavvy rerun NAME`",
    ),
    "key-reused": ErrorCode(
        status=409,
        meaning="The idempotency key was used for another submission.",
        hint="make a new key for every submission",
    ),
    "claimed": ErrorCode(
        status=409,
        meaning="The claim is not this agent's, or its attempt is over.",
        hint="stop and leave",
    ),
    "too-large": ErrorCode(
        status=413,
        meaning="The body is larger than a setting allows.",
        hint="raise server.request_mib or server.blob_mib, or send less",
    ),
    "too-slow": ErrorCode(
        status=408, meaning="The body did not arrive in time.", hint="send it again"
    ),
    "agent-protocol": ErrorCode(
        status=426,
        meaning="The server does not speak the agent's version of the protocol.",
        hint="the node is launched again with a newer agent",
    ),
    "provider-refused": ErrorCode(
        status=502,
        meaning="A provider refused: quota, credentials or policy.",
        hint="the message says which; `cavvy check` checks every provider",
    ),
    "provider-unreachable": ErrorCode(
        status=503,
        meaning="A provider is unreachable or failing.",
        hint="try again; `cavvy check` checks every provider",
    ),
    "data-missing": ErrorCode(
        status=404,
        meaning="The object that an input or output names does not exist.",
        hint="compare its URL with the storage",
    ),
    "data-denied": ErrorCode(
        status=403,
        meaning="A storage does not allow what an input or output needs.",
        hint="the message says which key or permission is missing; keys are set with `cavvy secret "
        "set`",
    ),
    "data-trouble": ErrorCode(
        status=503, meaning="A storage is unreachable or failing.", hint="try again"
    ),
    "disk-full": ErrorCode(
        status=507,
        meaning="The server's disk is full; nothing was written and nothing is lost.",
        hint="make room on the disk of the state folder, then repeat",
    ),
    "database-unusable": ErrorCode(
        status=503,
        meaning="The database is newer than this program, damaged or unreachable.",
        hint="the message says how to repair it",
    ),
    "internal": ErrorCode(
        status=500,
        meaning="A fault of Cavvy; the server's log has the details.",
        hint="see `cavvy server logs` and report it",
    ),
}


class ApiProblem(Exception):
    """A request that failed, and why. `code` is one of CODES."""

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
    """The same request may succeed later."""

    def __init__(self, code: str, message: str, hint: str = "", *, after_s: int = 1) -> None:
        super().__init__(code, message, hint, {"Retry-After": str(after_s)})


def reference() -> str:
    """The text of docs/reference/errors.md."""
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
