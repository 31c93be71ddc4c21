"""Speaks GitHub's protocol of runner scale sets, as https://github.com/actions/scaleset and
https://github.com/actions/actions-runner-controller speak it.

A scale set has a name, which is the label in `runs-on`. GitHub assigns jobs with this label to the
scale set, and tells by messages how many jobs it has assigned. A message is delivered again until
it is deleted, to the one session that a scale set has. A runner is registered under its name, with
a configuration that is valid for one job; GitHub deletes the runner after this job.

* GitHubProblem     the message says what GitHub has refused
  + GitHubSilent    GitHub did not answer, or has a fault: a later attempt may succeed
  + SessionTaken    another controller has the session of the scale set
  + RunnerBusy      a job is assigned to the runner, so it cannot be removed
"""

import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from msgspec import Struct, ValidationError, convert, field

from cavvy.http_client import HttpClient, HttpReply, NoReply

_T = TypeVar("_T")
_VERSION = "6.0-preview"  # of the API of the Actions service
_SETS = "_apis/runtime/runnerscalesets"
_RUNNERS = "_apis/distributedtask/pools/0/agents"
_HOSTED = ("github.com", "www.github.com")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
# GitHub answers a long poll without a message after 50 s; a proxy may add to this.
_POLL_S = 90.0
_CALL_S = 60.0
_EARLY_S = 60  # a token is replaced this long before it expires
# A key's JWT is valid for at most 10 minutes, and for clocks that differ by a minute:
# https://docs.github.com/en/apps/creating-github-apps/authenticating-with-a-github-app
_JWT_S, _SKEW_S = 540, 60
_DEFAULT_GROUP = 1  # the ID of the runner group `default`
_MOST_TEXT = 300  # characters of an error of GitHub that are shown
_MARK = b"\xef\xbb\xbf"  # the byte order mark with which some answers begin


class GitHubProblem(Exception):
    """Raised if GitHub refuses a request. `status` is that of its answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class GitHubSilent(GitHubProblem):
    """Raised if GitHub did not answer, or has a fault."""


class SessionTaken(GitHubProblem):
    """Raised if a scale set has a session already. GitHub ends the session of a controller that was
    killed after some minutes."""


class RunnerBusy(GitHubProblem):
    """Raised if a runner cannot be removed, because a job is assigned to it."""


class AppKey(Struct, frozen=True, kw_only=True):
    """The key of a GitHub App that is installed in an organization or repository."""

    client_id: str
    installation: str
    pem: str


class SetStatistics(Struct, frozen=True, kw_only=True, rename="camel"):
    """`total_assigned_jobs` counts the assigned jobs that have not ended, also running ones."""

    total_assigned_jobs: int = 0


class SetLabel(Struct, frozen=True, kw_only=True):
    name: str
    type: str = "System"


class ScaleSet(Struct, frozen=True, kw_only=True, rename="camel"):
    id: int
    name: str
    labels: list[SetLabel] = []


class RegisteredRunner(Struct, frozen=True, kw_only=True, rename="camel"):
    id: int
    name: str


class CiJobMessage(Struct, frozen=True, kw_only=True, rename="camel"):
    """What a message says of one job. `message_type` is JobAvailable, JobAssigned, JobStarted or
    JobCompleted."""

    message_type: str
    runner_request_id: int = 0
    runner_name: str | None = None
    owner_name: str | None = None
    repository_name: str | None = None
    job_display_name: str | None = None
    workflow_run_id: int = 0
    result: str | None = None


class SetMessage(Struct, frozen=True, kw_only=True):
    id: int
    assigned: int
    jobs: list[CiJobMessage]


class _Named(Struct, rename="camel"):
    value: list[ScaleSet] = field(default_factory=list)


class _Registered(Struct, rename="camel"):
    value: list[RegisteredRunner] = field(default_factory=list)


class _MessageSession(Struct, rename="camel"):
    session_id: str
    message_queue_url: str
    message_queue_access_token: str
    statistics: SetStatistics | None = None


class _Message(Struct, rename="camel"):
    message_id: int
    message_type: str
    body: str | None = None
    statistics: SetStatistics | None = None


class _Configuration(Struct, rename={"encoded": "encodedJITConfig"}):
    encoded: str


class _Connection(Struct):
    url: str
    token: str


class _Token(Struct):
    token: str


class ScaleSetService:
    """The scale sets of one organization, repository or enterprise, whose address is `url`.
    `credentials` are a token or the key of an app. `now` returns seconds since 1970. Methods raise
    GitHubProblem. Any number of threads may use a service.
    """

    def __init__(
        self, url: str, credentials: str | AppKey, now: Callable[[], float] = time.time
    ) -> None:
        self._parts = _read_address(url)
        self.url = self._parts.geturl()
        self._credentials, self._now = credentials, now
        self._http = HttpClient(idle_s=_CALL_S, limit_s=_CALL_S)
        self._polls = HttpClient(idle_s=_POLL_S, limit_s=_POLL_S)
        self._service, self._token, self._until = "", "", 0.0

    def open_scale_set(
        self, name: str, group: str | None, others: Sequence[str] | None = None
    ) -> ScaleSet:
        """Return the scale set of this name in a runner group, or create it. Its labels are its
        name and the `others`, for jobs whose `runs-on` names several; None leaves them as they are.
        """
        number = _DEFAULT_GROUP if group is None else self._find_group(group)
        asked = {"runnerGroupId": str(number), "name": name}
        found = self._ask("GET", _SETS, _Named, query=asked).value
        wanted = list(dict.fromkeys((name, *(others or ()))))
        if found:
            known = {each.name for each in found[0].labels} or {name}  # old servers tell none
            if others is None or known == {*wanted}:
                return found[0]
        body = {
            "name": name,
            "runnerGroupId": number,
            "labels": [{"type": "System", "name": each} for each in wanted],
            "RunnerSetting": {"ephemeral": True, "disableUpdate": True},
        }
        if found:
            return self._ask("PATCH", f"{_SETS}/{found[0].id}", ScaleSet, body)
        return self._ask("POST", _SETS, ScaleSet, body)

    def delete_scale_set(self, scale_set: int) -> None:
        self._call("DELETE", f"{_SETS}/{scale_set}")

    def register_runner(self, scale_set: int, name: str) -> str:
        """Register a runner for one job, and return its configuration, which is a secret. A runner
        of this name that was registered before is replaced."""
        body = {"name": name, "workFolder": "_work"}
        path = f"{_SETS}/{scale_set}/generatejitconfig"
        try:
            return self._ask("POST", path, _Configuration, body).encoded
        except GitHubProblem as problem:
            if problem.status != 409 or not self.remove_runner(name):
                raise
        return self._ask("POST", path, _Configuration, body).encoded

    def is_registered(self, name: str) -> bool:
        return self._find_runner(name) is not None

    def remove_runner(self, name: str) -> bool:
        """Remove a runner, and return whether it was registered. Raises RunnerBusy."""
        found = self._find_runner(name)
        if found is None:
            return False
        self._call("DELETE", f"{_RUNNERS}/{found.id}", gone=True)
        return True

    def open_session(self, scale_set: int, owner: str) -> "SetSession":
        """Open the session of a scale set. Raises SessionTaken."""
        try:
            path = f"{_SETS}/{scale_set}/sessions"
            made = self._ask("POST", path, _MessageSession, {"ownerName": owner})
        except GitHubProblem as problem:
            if problem.status == 409:
                raise SessionTaken(str(problem), 409) from problem
            raise
        return SetSession(self, scale_set, made)

    def _find_group(self, name: str) -> int:
        found = self._ask("GET", "_apis/runtime/runnergroups/", _Named, query={"groupName": name})
        if not found.value:
            raise GitHubProblem(f"there is no runner group {name}", 404)
        return found.value[0].id

    def _find_runner(self, name: str) -> RegisteredRunner | None:
        found = self._ask("GET", _RUNNERS, _Registered, query={"agentName": name}).value
        return found[0] if found else None

    def _ask(
        self,
        method: str,
        path: str,
        kind: type[_T],
        body: object = None,
        query: Mapping[str, str] | None = None,
    ) -> _T:
        return _decode(self._call(method, path, body, query), kind)

    def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        *,
        gone: bool = False,
        token: str = "",
    ) -> HttpReply:
        """Call the Actions service, as its administrator or with another token. With `gone`, a
        thing that does not exist is no problem."""
        own = token or self._renew()
        base = urlsplit(self._service)
        asked = urlencode({**(query or {}), "api-version": _VERSION})
        asked = f"{base.query}&{asked}" if base.query else asked
        url = base._replace(path=f"{base.path.rstrip('/')}/{path}", query=asked).geturl()
        reply = self._send(method, url, f"Bearer {own}", body)
        if reply.status == 401 and not token:
            self._until = 0.0
            reply = self._send(method, url, f"Bearer {self._renew()}", body)
        if not (gone and reply.status == 404):
            _check(reply, f"{method} {path}")
        return reply

    def _renew(self) -> str:
        """Return the token of the Actions service's administrator, which is renewed before it
        expires."""
        if self._now() < self._until - _EARLY_S:
            return self._token
        path = f"{_find_scope(self._parts)}/actions/runners/registration-token"
        registration = self._post(path, f"Bearer {self._authenticate()}", "")
        token = _decode(registration, _Token).token
        asked = {"url": self.url, "runner_event": "register"}
        path = "/actions/runner-registration"
        found = _decode(self._post(path, f"RemoteAuth {token}", asked), _Connection)
        self._check_scheme(found.url)
        self._service, self._token = found.url, found.token
        self._until = _read_expiry(found.token, self._now())
        return found.token

    def _authenticate(self) -> str:
        """Return the token of the user, or one of the app's installation."""
        if isinstance(self._credentials, str):
            return self._credentials
        own = _sign(self._credentials, int(self._now()))
        path = f"/app/installations/{quote(self._credentials.installation, safe='')}/access_tokens"
        return _decode(self._post(path, f"Bearer {own}", ""), _Token).token

    def _post(self, path: str, authorization: str, body: object) -> HttpReply:
        """Call GitHub's API, which on servers of companies is below /api/v3."""
        host, prefix = self._parts.netloc, "/api/v3"
        if self._parts.hostname in _HOSTED or str(self._parts.hostname).endswith(".ghe.com"):
            host, prefix = f"api.{host.removeprefix('www.')}", ""
        url = f"{self._parts.scheme}://{host}{prefix}{path}"
        reply = self._send("POST", url, authorization, body)
        _check(reply, f"POST {path}")
        return reply

    def _send(
        self,
        method: str,
        url: str,
        authorization: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *,
        polls: bool = False,
    ) -> HttpReply:
        every = {
            "Authorization": authorization,
            "Accept": f"application/json; api-version={_VERSION}",
            "Content-Type": "application/json",
            **(headers or {}),
        }
        data = None if body is None else b"" if body == "" else json.dumps(body).encode()
        try:
            return (self._polls if polls else self._http).send(method, url, data, every)
        except NoReply as error:
            raise GitHubSilent(f"no answer from {urlsplit(url).netloc}: {error}") from error

    def _check_scheme(self, url: str) -> None:
        """Tokens go only to addresses with TLS, as the one of the user."""
        if self._parts.scheme == "https" and urlsplit(url).scheme != "https":
            raise GitHubProblem("GitHub named a service without https://")


class SetSession:
    """The session that receives the messages of a scale set."""

    def __init__(self, service: ScaleSetService, scale_set: int, made: _MessageSession) -> None:
        self._service, self._scale_set = service, scale_set
        self._last = 0
        self._take(made)
        self.assigned = made.statistics.total_assigned_jobs if made.statistics else 0

    def next_message(self, most: int) -> SetMessage | None:
        """Wait for the next message, or return None if there is none for a while. `most` is the
        number of runners that this scale set can have."""
        query = {"lastMessageId": str(self._last)} if self._last else {}
        reply = self._send("GET", "", query, {"X-ScaleSetMaxCapacity": str(most)}, polls=True)
        if reply.status == 202:
            return None
        found = _decode(reply, _Message)
        return SetMessage(
            id=found.message_id,
            assigned=found.statistics.total_assigned_jobs if found.statistics else self.assigned,
            jobs=_read_jobs(found),
        )

    def acquire(self, requests: list[int]) -> None:
        """Let GitHub assign these available jobs to the scale set."""
        path = f"{_SETS}/{self._scale_set}/acquirejobs"
        try:
            self._service._call("POST", path, requests, token=self._token)
        except GitHubProblem as problem:
            if problem.status != 401:
                raise
            self._refresh()
            self._service._call("POST", path, requests, token=self._token)

    def delete_message(self, message: SetMessage) -> None:
        self._send("DELETE", f"/{message.id}", {})
        self._last, self.assigned = message.id, message.assigned

    def close(self) -> None:
        self._service._call("DELETE", self._path, gone=True)

    @property
    def _path(self) -> str:
        return f"{_SETS}/{self._scale_set}/sessions/{self._id}"

    def _take(self, made: _MessageSession) -> None:
        self._service._check_scheme(made.message_queue_url)
        self._id, self._queue = made.session_id, made.message_queue_url
        self._token = made.message_queue_access_token

    def _refresh(self) -> None:
        self._take(self._service._ask("PATCH", self._path, _MessageSession))

    def _send(
        self,
        method: str,
        below: str,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
        *,
        polls: bool = False,
    ) -> HttpReply:
        """Call the queue of messages, whose token expires."""
        for last in (False, True):
            base = urlsplit(self._queue)
            asked = "&".join(part for part in (base.query, urlencode(query)) if part)
            url = base._replace(path=base.path + below, query=asked).geturl()
            reply = self._service._send(
                method, url, f"Bearer {self._token}", None, headers, polls=polls
            )
            if reply.status != 401 or last:
                break
            self._refresh()
        _check(reply, f"{method} of a message")
        return reply


def _read_address(url: str) -> SplitResult:
    """Return the parts of the address of an organization, repository or enterprise. Raises
    GitHubProblem."""
    hint = "expected https://github.com/ORGANIZATION or https://github.com/OWNER/REPOSITORY"
    try:
        parts = urlsplit(url.strip("/"))
        host, names = parts.hostname, parts.path.strip("/").split("/")
    except ValueError as error:
        raise GitHubProblem(f"{url!r} is not an address; {hint}") from error
    if not host or not all(names) or len(names) > 2 or parts.query or "@" in parts.netloc:
        raise GitHubProblem(f"{url!r} is not an address of runners; {hint}")
    if parts.scheme != "https" and not (parts.scheme == "http" and host in _LOOPBACK):
        raise GitHubProblem(f"{url!r} does not begin with https://; {hint}")
    return parts


def _find_scope(parts: SplitResult) -> str:
    """Return the path of the organization, repository or enterprise in GitHub's API."""
    names = [quote(each, safe="") for each in parts.path.strip("/").split("/")]
    if len(names) == 1:
        return f"/orgs/{names[0]}"
    if names[0].lower() == "enterprises":
        return f"/enterprises/{names[1]}"
    return f"/repos/{names[0]}/{names[1]}"


def _sign(app: AppKey, now_s: int) -> str:
    import jwt

    begin = now_s - _SKEW_S
    claims = {"iat": begin, "exp": begin + _JWT_S, "iss": app.client_id}
    try:
        return jwt.encode(claims, app.pem, algorithm="RS256")
    except (ValueError, TypeError, jwt.PyJWTError):  # the text may quote the key
        raise GitHubProblem("the key of the app is not an RSA key in the PEM format") from None


def _read_expiry(token: str, now_s: float) -> float:
    """Return when a JWT expires, in seconds since 1970, or now if it does not say so."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return float(claims["exp"])
    except (ValueError, IndexError, KeyError, TypeError):
        return now_s


def _read_jobs(message: _Message) -> list[CiJobMessage]:
    """Return what a message says of jobs. What is not understood is left out: the message would be
    delivered for ever, and its statistics say how many runners are needed."""
    try:
        rows = json.loads(message.body or "[]")
    except (ValueError, RecursionError):
        return []
    found = []
    for row in rows if isinstance(rows, list) else ():
        with suppress(ValidationError):
            found.append(convert(row, CiJobMessage))
    return found


def _decode(reply: HttpReply, kind: type[_T]) -> _T:
    try:
        return convert(json.loads(reply.body.removeprefix(_MARK)), kind)
    except (ValueError, RecursionError, ValidationError) as error:
        raise GitHubSilent("GitHub sent an answer that is not understood") from error


def _check(reply: HttpReply, what: str) -> None:
    """Raise the problem that an answer reports."""
    if reply.status < 300:
        return
    kind, told = _read_problem(reply)
    text = f"GitHub refused {what} with status {reply.status}" + (told and f": {told}")
    if "JobStillRunningException" in kind:
        raise RunnerBusy(text, reply.status)
    raise (GitHubSilent if reply.is_passing else GitHubProblem)(text, reply.status)


def _read_problem(reply: HttpReply) -> tuple[str, str]:
    """Return the kind and the text of an error."""
    try:
        found: Any = json.loads(reply.body.removeprefix(_MARK))
    except (ValueError, RecursionError):
        return "", ""
    if not isinstance(found, dict):
        return "", ""
    text = "".join(filter(str.isprintable, str(found.get("message") or "")))
    return str(found.get("typeName") or ""), text[:_MOST_TEXT]
