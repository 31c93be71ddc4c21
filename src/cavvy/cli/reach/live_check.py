"""Rents the cheapest machine of a provider for about a minute, for `cavvy check NAME --live`.

The server on this computer runs the check as one small job. The server removes the machine even if
this command is killed, but cannot do so while the computer is off.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.providers import load_providers
from cavvy.cli.reach.session import default_project, make_failure, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.wire import JobDetail, Submitted
    from cavvy.domain.offers import Offer
    from cavvy.domain.units import Money

# estimated billed time: the boot, one minute of work, and the removal
_BILLED = timedelta(minutes=10)
_LONGEST_S = 20 * 60.0  # A machine whose agent has not answered after this time is removed.
_REMOVAL_S = 10 * 60.0  # maximum time that the command waits for the removal
_MEMORY_MIB = 1024  # minimum memory of the rented machine
_LOOK_S = 1.0
_TASK = "echo agent answers; uname -srm; sleep 5"
_ENDED = ("done", "failed", "stopped")


class LiveStep(Struct, frozen=True, kw_only=True):
    """One step of the check. `at_s` is the time at which the step was complete, in seconds since
    the submission.
    """

    at_s: float
    text: str


class LiveCheck(Struct, frozen=True, kw_only=True):
    """The result of a live check of a provider."""

    provider: str
    offer: str
    steps: Sequence[LiveStep]
    problem: str  # "" if the agent answered and the machine is gone
    bill_micros: int
    left: Sequence[str]  # gangs that still exist
    recording: Path | None


def check_live(name: str, limit: "Money") -> LiveCheck:
    """Rent a machine, and print each step on standard error. The machine is also removed after
    Ctrl-C or an error. Raises CommandFailure.
    """
    from cavvy.domain.units import format_rate

    offer = _find_cheapest(name, limit)
    if warning := _warn(name):
        click.echo(f"{name}: {warning}", err=True)
    place = f"{offer.instance_type} in {offer.region}"
    click.echo(f"{name}: {place}, {format_rate(offer.rate)}", err=True)
    with session() as client:
        job = _submit(client, offer, limit)
        return _JobWatch(client, job).run(offer)


def price_of(offer: "Offer") -> "Money":
    """Return the expected price of the check on this offer, if the machine boots in the usual
    time.
    """
    return offer.rate.over(max(_BILLED, offer.minimum_charge))


def _warn(name: str) -> str:
    """Return a warning to keep this computer on, or "" if the provider's machines can terminate
    themselves.
    """
    from cavvy.providers.base import Feature

    if Feature.SELF_END not in load_providers([name])[name].manifest.unsupported:
        return ""
    return (
        "keep this computer on and connected until the machine is removed: the server on this "
        "computer removes the machine, and billing continues until then, even above --max-usd"
    )


def _find_cheapest(name: str, limit: "Money") -> "Offer":
    """Return the cheapest on-demand offer. Raises CommandFailure if this offer costs more than the
    limit.
    """
    import asyncio

    from cavvy.domain.offers import Purchase
    from cavvy.domain.units import format_usd
    from cavvy.providers.base import ProviderError

    try:
        found = asyncio.run(_read_offers(name))
    except (ProviderError, TimeoutError) as error:
        raise CommandFailure(f"{name}: {error or 'no answer'}") from error
    usable = [
        each
        for each in found
        if each.purchase is Purchase.ON_DEMAND
        and each.capacity != 0
        and each.requires is None
        and (not each.memory_mib or each.memory_mib >= _MEMORY_MIB)
    ]
    if not usable:
        raise CommandFailure(f"{name} has no on-demand offer now")
    best = min(usable, key=lambda each: (price_of(each).micros, each.key))
    if price_of(best).micros > limit.micros:
        raise CommandFailure(
            f"the cheapest machine of {name}, {best.instance_type} in {best.region}, costs "
            f"{format_usd(price_of(best))} for {_BILLED.seconds // 60} minutes, more than "
            f"{format_usd(limit)}; nothing was rented",
            "allow more with --max-usd",
        )
    return best


async def _read_offers(name: str) -> "Sequence[Offer]":
    import asyncio

    from cavvy.cli.reach.providers import ASK_TIMEOUT_S
    from cavvy.providers.abilities import CLOSEABLE, ability

    provider = load_providers([name])[name]
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return await provider.offers()
    finally:
        if closeable := ability(provider, CLOSEABLE):
            await closeable.close()


def _submit(client: "ApiClient", offer: "Offer", limit: "Money") -> "Submitted":
    """Submit the check's job, with only this offer, a single attempt and the cost limit."""
    import getpass

    from cavvy.providers.recording import TAG

    task = {
        "name": f"check-{offer.provider}",
        "resources": {
            "providers": [offer.provider],
            "regions": [offer.region],
            "instance": offer.instance_type,
            "spot": "never",
        },
        "limits": {"budget": str(limit.usd), "duration": "5m", "unattended": "10m"},
        "retry": {"preemption": 0, "node": 0, "exit": 0},
        "tags": {TAG: "1"},
        "run": _TASK,
    }
    return client.submit(
        json.dumps(task),
        project=default_project(),
        path="check.yaml",
        user=getpass.getuser(),
        consent=True,
    )


class _JobWatch:
    """Follows the job, and ensures that the job's machine is removed."""

    def __init__(self, client: "ApiClient", job: "Submitted") -> None:
        self._client, self._project, self._id = client, job.project, job.id
        self._steps: list[LiveStep] = []
        self._after = 0

    def run(self, offer: "Offer") -> LiveCheck:
        problem = "interrupted"
        try:
            problem = self._follow()
        except KeyboardInterrupt:
            click.echo("interrupted; the machine is being removed", err=True)
        finally:
            job = self._remove()
        ends = [each.ended_at for each in job.attempts if each.ended_at is not None]
        if ends and len(ends) == len(job.attempts):
            self._note((max(ends) - job.submitted_at).total_seconds(), "the machine is gone")
        left = self._left(offer.provider, job)
        return LiveCheck(
            provider=offer.provider,
            offer=offer.key,
            steps=self._steps,
            problem=problem or ("the machine still exists" if left else ""),
            bill_micros=self._client.cost(self._project, self._id).total_micros,
            left=left,
            recording=_find_recording(offer.provider, [each.gang for each in job.attempts]),
        )

    def _follow(self) -> str:
        """Wait until the job has ended. Returns why the check failed, or "" if it passed."""
        until = monotonic() + _LONGEST_S
        while True:
            job = self._look()
            outcomes = [each.outcome for each in job.attempts]
            if job.phase in _ENDED:
                return "" if job.phase == "done" else job.stop_reason or _reason(job)
            if "capacity" in outcomes or "refused" in outcomes:
                return _reason(job)
            if monotonic() > until:
                return f"no agent answered within {_LONGEST_S / 60:.0f} minutes"

    def _remove(self) -> "JobDetail":
        """Stop the job, and wait until the job's machine is removed and its bill is complete."""
        from cavvy.client import ApiError

        until = monotonic() + _REMOVAL_S
        try:
            self._client.stop(self._project, self._id, reason="the check has ended")
            while True:
                job = self._look()
                over = all(each.phase == "ended" for each in job.attempts)
                if (job.phase in _ENDED and over) or monotonic() > until:
                    return job
        except ApiError as error:
            raise make_failure(error) from error
        except KeyboardInterrupt as error:
            hint = "the server continues the removal; `cavvy nodes` shows what is still billed"
            raise CommandFailure("interrupted before the machine was removed", hint, 130) from error

    def _look(self) -> "JobDetail":
        """Print the events that arrived since the last call, and return the job."""
        page = self._client.events(self._project, self._id, after=self._after, wait_s=_LOOK_S)
        job = self._client.job(self._project, self._id)
        for event in page.events:
            self._note((event.at - job.submitted_at).total_seconds(), event.text)
        self._after = page.last
        if page.over and not page.events:
            sleep(_LOOK_S / 2)  # All events have arrived, but the machine is still being removed.
        return job

    def _note(self, at_s: float, text: str) -> None:
        self._steps.append(LiveStep(at_s=round(at_s, 1), text=text))
        click.echo(f"{at_s:8.1f} s  {text}", err=True)

    def _left(self, provider: str, job: "JobDetail") -> Sequence[str]:
        """Return the job's gangs that the provider still lists as running. If the provider does not
        answer, the result is the reason instead.
        """
        gangs = {("gang", each.gang) for each in job.attempts}
        found = self._client.down(dry_run=True)
        listed = [each.name for each in found if (each.kind, each.name) in gangs]
        return listed + [
            f"unknown: {each.why}"
            for each in found
            if (each.kind, each.name) == ("provider", provider)
        ]


def _reason(job: "JobDetail") -> str:
    reasons = [each.reason for each in job.attempts if each.reason]
    return reasons[-1] if reasons else f"the job is {job.phase}"


def _find_recording(provider: str, gangs: Sequence[str]) -> Path | None:
    """Return the path of the file in which the server on this machine recorded the requests, or
    None if there is no such file.
    """
    from cavvy.client.state import default_home
    from cavvy.providers.recording import FOLDER

    folder = Path(default_home()) / "providers" / provider / FOLDER
    files = [folder / f"{gang}.json" for gang in gangs]
    return next((each for each in reversed(files) if each.exists()), None)
