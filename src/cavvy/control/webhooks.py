"""Notifies users' own services that a job ended, failed or reached its budget. A failed delivery is
retried for 45 minutes.

A delivery is a key on the worklist. The success or failure of the delivery is recorded as an event
of the job. Deliveries that a restart interrupts are resumed: the server looks for interrupted
deliveries among recently ended jobs. A receiver may receive the same message twice. Messages
contain no secrets.
"""

import asyncio
import json
import urllib.parse
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.decide.rows import make_event
from cavvy.control.decide.transitions import find_undelivered, wanted_deliveries
from cavvy.control.worklist import WIDTH
from cavvy.domain.jobs import JOB_ENDS, JobPhase, JobRecord
from cavvy.domain.targets import EVERY
from cavvy.domain.tasks import Delivery, WebhookTarget
from cavvy.http_client import HttpClient, InvalidRequest, NoReply, TargetDenied
from cavvy.store.base import AtomicWrite, RowNotFound
from cavvy.store.sql import Store

_PREFIX = "webhook:"
_TRIES = 10
# the pause doubles with each try: 5 s, 10 s, ... 21 min, which is 43 min in all
_FIRST_PAUSE = timedelta(seconds=5)
_TIMEOUT_S = 10  # maximum seconds until the head of the answer is complete
_LONGEST_S = 30  # maximum seconds for one message; a name server can be slow, too
_MOST_SAID = 200  # maximum characters of a problem's text, which may quote the receiver
_LATELY = timedelta(hours=2)

# takes the URL and the JSON, and returns "" or the problem; may raise TargetDenied
Post = Callable[[str, bytes], Awaitable[str]]


def webhook_key(job_id: str, what: Delivery) -> str:
    """Return the worklist's key for the delivery `what` of this job."""
    return f"{_PREFIX}{job_id}:{what}"


def is_webhook_key(key: str) -> bool:
    return key.startswith(_PREFIX)


def job_of_webhook(key: str) -> str:
    """Return the ID of the job to which a webhook key belongs."""
    return key.removeprefix(_PREFIX).partition(":")[0]


class Webhooks:
    """Reconciles webhook keys."""

    def __init__(self, store: Store, clock: ControlClock, post: Post | None = None) -> None:
        self._store = store
        self._clock = clock
        self._post = post or post_json
        self._tries: dict[str, int] = {}
        self._told: dict[str, set[str]] = {}  # key -> URLs to which the message was delivered

    async def reconcile(self, key: str) -> timedelta | None:
        _, job_id, word = key.split(":", 2)
        what = Delivery(word)
        try:
            job = await self._store.job(job_id)
        except RowNotFound:
            return None
        told = self._told.setdefault(key, set())
        problems = []
        for hook in job.task.webhooks:
            if what not in hook.on or hook.url in told:
                continue
            try:
                problem = await self._post(hook.url, _payload(job, what))
            except TargetDenied as error:  # another try would be refused, too
                told.add(hook.url)
                await self._tell(job, hook, what, f"was not called: {error}")
                continue
            if problem:
                problems.append((hook, problem))
            else:
                told.add(hook.url)
                await self._tell(job, hook, what, "was told")
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        if problems and tries < _TRIES:
            return _FIRST_PAUSE * (1 << (tries - 1))
        for hook, problem in problems:
            await self._tell(job, hook, what, f"could not be delivered in {tries} tries: {problem}")
        del self._tries[key], self._told[key]
        return None

    async def unfinished(self) -> list[str]:
        """Return the keys of the deliveries that a restart may have interrupted."""
        page = await self._store.list_jobs(None, phases=JOB_ENDS | {JobPhase.STOPPING}, limit=100)
        keys = []
        for summary in page.jobs:
            if summary.ended_at is not None and self._clock.now() - summary.ended_at > _LATELY:
                continue
            job = await self._store.job(summary.id)
            if wanted := wanted_deliveries(job):
                missing = find_undelivered(job, wanted, await self._store.events(job.id))
                keys += [webhook_key(job.id, what) for what in missing]
        return keys

    async def _tell(self, job: JobRecord, hook: WebhookTarget, what: Delivery, text: str) -> None:
        host = (
            urllib.parse.urlsplit(hook.url).hostname or "the receiver"
        )  # show only the host, because the rest of a URL may be a secret
        now, text = self._clock.now(), f"{what}: {host} {text}"
        event = make_event(job, now, "webhook", text, fact=what)
        await self._store.commit(AtomicWrite(events=[event]))


async def post_json(url: str, body: bytes, targets: str = EVERY) -> str:
    """POST JSON; return "" on success, otherwise the problem. `targets` are the private targets
    that may be called. Raises TargetDenied for a target that may not be called.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        return "not an http or https address"
    sent = asyncio.get_running_loop().run_in_executor(_THREADS, _post, url, body, targets)
    try:
        async with asyncio.timeout(_LONGEST_S):
            return await sent
    except TimeoutError:
        return f"no answer within {_LONGEST_S} s"


# Separate threads, because receivers can be slow: other work of the server must not wait for them.
_THREADS = ThreadPoolExecutor(WIDTH, "webhooks")


def _post(url: str, body: bytes, targets: str) -> str:
    client = HttpClient(targets=targets, idle_s=_TIMEOUT_S, limit_s=_TIMEOUT_S, most_bytes=0)
    try:
        reply = client.send("POST", url, body, {"Content-Type": "application/json"})
    except InvalidRequest:
        return "the address cannot be called"
    except NoReply as error:
        return str(error)[:_MOST_SAID]
    if reply.status < 300:
        return ""
    if reply.status < 400:
        return f"a redirect ({reply.status}); redirects are not followed"
    return reply.reason[:_MOST_SAID] or f"status {reply.status}"


def _payload(job: JobRecord, what: Delivery) -> bytes:
    return json.dumps(
        {
            "event": what,
            "job": job.name,
            "job_id": job.id,
            "project": job.project,
            "phase": job.phase,
            "reason": job.reason,
            "exit_code": job.exit_code,
            "attempts": job.attempt,
            "submitted_at": job.submitted_at.isoformat(),
            "ended_at": job.ended_at.isoformat() if job.ended_at else None,
        }
    ).encode()
