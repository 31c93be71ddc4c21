"""What `cavvy plan` answers for a task: the offers, why others do not fit, warnings and advice."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from cavvy.cli.task.available import AvailableOffers
    from cavvy.domain.tasks import TaskSpec
    from cavvy.planner.deadline.forecast import Forecast
    from cavvy.planner.explain import Explanation
    from cavvy.planner.placements import PlacementPlan


class PlanAnswer(Struct, frozen=True):
    """The plan for one of the alternatives under a task's resources."""

    task: "TaskSpec"
    by: str
    offered: "AvailableOffers"
    made: "PlacementPlan"
    found: "Explanation"
    message: str  # why no offer fits, or "" if an offer fits
    forecast: "Sequence[Forecast]"
    warnings: Sequence[str]
    advice: Sequence[str] = ()  # what the task's model needs, and what would make it cheaper


def find_answer(
    task: "TaskSpec",
    by: str,
    limit: int | None,
    all_locations: bool,
    ready: bool,
    output_mib: int | None,
) -> PlanAnswer:
    from cavvy.cli.task.available import PlanRequest, advise_spot, gather
    from cavvy.cli.task.market import tell_forecast
    from cavvy.planner.explain import explain, say_no_offer
    from cavvy.planner.placements import Objective, RankingView
    from cavvy.planner.rank import plan, warn_of_dear_spot, warn_of_notices

    now, view = datetime.now(UTC), RankingView(limit=limit, distinct=not all_locations)
    only = PlanRequest(now=now, by=Objective(by), view=view)
    offered = gather(task, anywhere=not ready, output_mib=output_mib, only=only)
    made = plan(
        task,
        offered.offers,
        now=now,
        by=only.by,
        situation=offered.situation,
        view=view,
        others=offered.others,
    )
    forecast = tell_forecast(task, offered.offers, now, offered.situation.egress)
    warnings = warn_of_notices(task, offered.spots, offered.situation.notices)
    warnings += warn_of_dear_spot(task, offered.offers, offered.fixed, now, offered.situation)
    warnings += _warn_of_waits(task, offered)
    found = explain(offered.matches, made, refused=offered.refused, readiness=offered.readiness)
    message = ""
    if not made.placements:
        from cavvy.cli.task.problems import lead_to_wholes

        found, told = lead_to_wholes(task, found)
        message = _say_missing(task, offered, ready) or told or say_no_offer(task, found)
    need = _say_need(task, made)
    cheaper = advise_spot(
        task,
        next(iter(made.placements), None) if only.by is Objective.COST else None,
        now,
        anywhere=not ready,
        output_mib=output_mib,
        market=offered.market,
    )
    advice = tuple(each for each in (need, cheaper) if each)
    return PlanAnswer(task, by, offered, made, found, message, forecast, warnings, advice)


def _say_need(task: "TaskSpec", made: "PlacementPlan") -> str:
    """Return what the task's model needs, if offers of the plan have less."""
    if not task.resources.accelerators:
        return ""
    from cavvy.cli.task.model_needs import say_need

    return say_need(task, [each.offer for each in made.placements])


def _say_missing(task: "TaskSpec", offered: "AvailableOffers", ready: bool) -> str:
    """Return why no offer was found, for example because the task contains an unknown name or, if
    `ready` is true, because a provider did not answer. Returns "" if the offers were found but do
    not meet the task's requirements.
    """
    from cavvy.domain.offers import list_sellers
    from cavvy.planner.candidates import say_unread

    asked = list_sellers(task.resources.providers) or offered.live
    if ready and offered.problems and offered.answered.isdisjoint(asked):
        return say_unread(offered.problems)
    return f"No offer: {_uncapital(offered.unknown)}" if offered.unknown else ""


def _warn_of_waits(task: "TaskSpec", offered: "AvailableOffers") -> tuple[str, ...]:
    """Warn about configured providers without a bucket for results: if the server is unreachable
    when the work ends, the providers' nodes keep running and are billed.
    """
    from cavvy.cli.reach.providers import load_settings
    from cavvy.domain.units import format_duration
    from cavvy.providers import registry
    from cavvy.providers.base import Feature

    stored = task.checkpoint is not None and task.checkpoint.storage is not None
    if stored or load_settings().text("server.results_url"):
        return ()
    here = {offer.provider for offer in offered.here}
    names = [
        name
        for name, known in sorted(registry.list_known().items())
        if name in here and Feature.RESULTS in registry.manifest_of(known).unsupported
    ]
    if not names:
        return ()
    longest = format_duration(task.limits.unattended)
    return (
        f"{', '.join(names)}: if nodes cannot reach the server when the work ends, they wait for "
        f"up to {longest} and are billed; to avoid this, name a bucket for results in "
        "`checkpoint.storage` or in the setting `server.results_url`",
    )


def _uncapital(text: str) -> str:
    return text[:1].lower() + text[1:] if text.startswith("The ") else text
