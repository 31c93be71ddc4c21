"""Routes for what a project's jobs can rent, what else the catalog knows, what was observed in the
markets, and what a job will probably still cost.
"""

import asyncio
from asyncio import to_thread
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Annotated

from fastapi import Query

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routes import views
from cavvy.api.routes.jobs import JobPath, ProjectPath, TextQuery, find_job
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, on_installation
from cavvy.api.wire import view
from cavvy.catalog.fit import match_offers
from cavvy.catalog.needs import NeedError, parse_accelerator
from cavvy.client import wire
from cavvy.domain.accounts import Permission
from cavvy.domain.jobs import JOB_ENDS
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import ResourceSpec, SpotPolicy
from cavvy.planner.deadline.forecast import foresee
from cavvy.store.snapshot import CatalogSnapshot
from cavvy.store.snapshot.layout import SnapshotError

_MARKET_AGE = timedelta(seconds=60)  # maximum age of the providers' answers
_MARKET_WAIT_S = 5.0
_MOST = 500

router = RouteGroup("markets", prefix="/v1")

_MARKETS = 500  # maximum number of markets for which single observations are listed
_RUNS = 60  # number of simulated runs for each answer


@router.get(
    "/projects/{project}/offers", rule=in_path(Permission.VIEW), errors=("invalid-request",)
)
async def offers(
    app_state: AppState,
    project: ProjectPath,
    gpu: TextQuery = "",
    provider: TextQuery = "",
    region: TextQuery = "",
    spot: SpotPolicy = SpotPolicy.AUTO,
    ready: bool = False,
    limit: Annotated[int, Query(ge=1, le=_MOST)] = _MOST,
) -> wire.OfferPage:
    """List the offers that the project's jobs can use now and, unless `ready` is set, the list
    prices of the catalog; the cheapest place of each machine type, cheapest first.
    """
    try:
        accelerators = parse_accelerator(gpu) if gpu else ()
    except NeedError as error:
        raise ApiProblem("invalid-request", f"gpu: {error}") from error
    need = ResourceSpec(
        accelerators=accelerators,
        providers=(provider.lower(),) if provider else (),
        regions=(region,) if region else (),
        spot=spot,
    )
    own: Sequence[Offer] = ()
    try:
        async with asyncio.timeout(_MARKET_WAIT_S):
            snapshot = await app_state.control_plane.pool.market(_MARKET_AGE)
        own = match_offers(snapshot.market.restrict(project).offers, need).offers
    except TimeoutError:
        pass  # the catalog's prices are better than none
    answered = {(each.provider, each.region) for each in own}
    listed = [] if ready else await to_thread(_match_catalog, need)
    others = (each for each in listed if (each.provider, each.region) not in answered)
    rows = [(each, True) for each in own] + [(each, False) for each in others]
    found = _choose_places(rows)
    return wire.OfferPage(
        offers=[_view(offer, ready=known, places=places) for offer, known, places in found[:limit]],
        total=len(found),
    )


def _match_catalog(need: ResourceSpec) -> Sequence[Offer]:
    """Return the catalog's offers that fit; none if there is no catalog."""
    try:
        with CatalogSnapshot.open() as snapshot:
            return snapshot.match(need, misses=0).offers
    except SnapshotError:
        return ()


def _choose_places(rows: Iterable[tuple[Offer, bool]]) -> list[tuple[Offer, bool, int]]:
    """Return the cheapest place of each machine type, whether jobs can use it now, and the number
    of its places; cheapest first.
    """
    best: dict[tuple[object, ...], tuple[Offer, bool, int]] = {}
    for offer, ready in rows:
        kind = (
            offer.provider,
            offer.instance_type,
            offer.accelerator_count,
            offer.purchase,
            ready,
        )
        known = best.get(kind)
        places = 1 if known is None else known[2] + 1
        if known is None or offer.rate.micros_per_hour < known[0].rate.micros_per_hour:
            best[kind] = (offer, ready, places)
        else:
            best[kind] = (known[0], ready, places)
    return sorted(best.values(), key=lambda row: (row[0].rate.micros_per_hour, row[0].key))


def _view(offer: Offer, *, ready: bool, places: int) -> wire.OfferView:
    return view(
        wire.OfferView,
        offer,
        accelerators=float(offer.accelerator_count * offer.accelerator_part),
        purchase=Purchase(offer.purchase).value,
        rate_micros_per_hour=offer.rate.micros_per_hour,
        ready=ready,
        places=places,
    )


@router.get("/markets", rule=on_installation(Permission.VIEW))
async def markets(app_state: AppState) -> list[wire.MarketListing]:
    """List the observations about each offer that was ever used."""
    history = app_state.control_plane.advisor.history
    knowledge = await history.knowledge(list(await history.standings())[:_MARKETS])
    found = sorted(knowledge.standings.items())
    return [views.market_row(known, knowledge.recent.get(key, ())) for key, known in found]


@router.get(
    "/projects/{project}/jobs/{name}/forecast",
    rule=in_path(Permission.VIEW),
    errors=("job-not-found",),
)
async def forecast(app_state: AppState, project: ProjectPath, name: JobPath) -> wire.ForecastView:
    """Get the forecast remaining cost of a job with a deadline, and the probability that the job
    ends in time.
    """
    job = await find_job(app_state, project, name)
    if job.phase in JOB_ENDS:
        return wire.ForecastView(runs=0, reason="the job has ended")
    found = await app_state.control_plane.advisor.policy_inputs(job)
    if found is None:
        why = "the job needs resources.spot: auto, a deadline, and work or limits.duration"
        return wire.ForecastView(runs=0, reason=why)
    inputs, knowledge, progress = found
    now_s = (app_state.now() - job.submitted_at).total_seconds()
    made = await to_thread(foresee, inputs, knowledge, progress, now_s, "auto", runs=_RUNS)
    return views.forecast_view(made)
