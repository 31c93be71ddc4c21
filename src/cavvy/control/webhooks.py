"""Notifies users' own services that a job ended, failed or reached its budget. A failed delivery is
retried for 45 minutes.

A delivery is a key on the worklist. The success or failure of the delivery is recorded as an event
of the job. Deliveries that a restart interrupts are resumed: the server looks for interrupted
deliveries among recently ended jobs. A receiver may receive the same message twice. Messages
contain no secrets.
"""

import asyncio
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.decide.rows import make_event
from cavvy.control.decide.transitions import find_undelivered, wanted_deliveries
from cavvy.control.loop import WIDTH
from cavvy.domain.jobs import JOB_ENDS, JobPhase, JobRecord
from cavvy.domain.targets import EVERY
from cavvy.domain.tasks import Delivery, WebhookTarget
from cavvy.providers.redirects import NoRedirects
from cavvy.store.base import AtomicWrite, RowNotFound
from cavvy.store.objects.base import ObjectDenied
from cavvy.store.objects.http import check_host, make_opener
from cavvy.store.sql import Store

_PREFIX = "webhook:"
_TRIES = 10
# the pause doubles with each try: 5 s, 10 s, ... 21 min, which is 43 min in all
_FIRST_PAUSE = timedelta(seconds=5)
_TIMEOUT_S = 10  # maximum seconds to connect to one address, and until the answer is complete
_LONGEST_S = 30  # maximum seconds for one message; a host name can have many addresses
_MOST_SAID = 200  # maximum characters of a problem's text, which may quote the receiver
_LATELY = timedelta(hours=2)

# takes the URL and the JSON, and returns "" or the problem; may raise ObjectDenied
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
            except ObjectDenied as error:  # another try would be refused, too
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
    that may be called. Raises ObjectDenied for a target that may not be called.
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
    headers = {"Content-Type": "application/json", "User-Agent": "cavvy"}
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        check_host(url, targets)
        with make_opener(NoRedirects, _TIMEOUT_S, targets).open(request, timeout=_TIMEOUT_S):
            return ""
    except http.client.InvalidURL:
        # do not show the error's text: it contains a part of the URL, which may be a secret
        return "the address cannot be called"
    except urllib.error.HTTPError as error:
        with error:
            moved = (
                f"a redirect ({error.code}); redirects are not followed" if error.code < 400 else ""
            )
            return moved or str(error.reason)[:_MOST_SAID] or f"status {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error))[:_MOST_SAID] or type(error).__name__


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
