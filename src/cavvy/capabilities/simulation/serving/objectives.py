"""Compares what a language model costs under different objectives, on the same requests."""

from collections.abc import Iterator, Sequence

from cavvy.capabilities.serving.autoscaler.terms import ScalingTerms
from cavvy.capabilities.simulation.serving.comparison import MONTH_HOURS
from cavvy.capabilities.simulation.serving.requests import RequestTrace
from cavvy.capabilities.simulation.serving.run import (
    AutoscalerController,
    on_demand_market,
    run_service,
)
from cavvy.capabilities.simulation.serving.service import ServiceSetting
from cavvy.domain.services import LatencyGoal
from cavvy.domain.values import Struct, replace

# the multiples of the stated objectives that are compared
FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)


class ObjectiveCost(Struct, frozen=True, kw_only=True):
    """A run with the objectives `ttft` and `token_gap`, `factor` times the stated ones. `ttft_s`
    and `gap_s` are the percentiles that were reached. `best_ttft_s` and `best_gap_s` are those that
    the autoscaler expects of any number of replicas, or None if it measured too few answers. `late`
    is the share of answers that missed an objective. `replicas` contains the lowest number of
    replicas after each full minute, the mean and the highest one, `limited` the share of the time
    in which more were needed than the service may have, and `history` the number at each minute.
    """

    factor: float
    ttft: LatencyGoal | None
    token_gap: LatencyGoal | None
    ttft_s: float
    gap_s: float
    best_ttft_s: float | None
    best_gap_s: float | None
    late: float
    replicas: tuple[int, float, int]
    limited: float
    replica_hours: float
    usd_hr: float
    history: tuple[tuple[float, int], ...]

    @property
    def usd_month(self) -> float:
        return self.usd_hr * MONTH_HOURS


def compare_objectives(
    trace: RequestTrace, terms: ScalingTerms, setting: ServiceSetting
) -> Sequence[ObjectiveCost]:
    """Return the cost of each multiple of the objectives. The trace must state tokens, and the
    setting the speed of the model.
    """
    return list(_run_all(trace, terms, setting))


def add_groups(
    groups: Sequence[Sequence[ObjectiveCost]], fixed_usd_hr: float
) -> Sequence[ObjectiveCost]:
    """Return the costs of a whole service, from those of its groups of replicas, and from what its
    routers cost in an hour. Each objective is that of the first group that has it.
    """
    return [_add(each, fixed_usd_hr) for each in zip(*groups, strict=True)]


def _add(parts: Sequence[ObjectiveCost], fixed_usd_hr: float) -> ObjectiveCost:
    first = next((each for each in parts if each.ttft is not None), parts[0])
    gap = next((each for each in parts if each.token_gap is not None), parts[0])
    least, mean, most = (sum(each.replicas[at] for each in parts) for at in range(3))
    return replace(
        first,
        token_gap=gap.token_gap,
        gap_s=gap.gap_s,
        best_gap_s=gap.best_gap_s,
        late=max(each.late for each in parts),
        replicas=(int(least), mean, int(most)),
        limited=max(each.limited for each in parts),
        replica_hours=sum(each.replica_hours for each in parts),
        usd_hr=sum(each.usd_hr for each in parts) + fixed_usd_hr,
        history=(),
    )


def _run_all(
    trace: RequestTrace, terms: ScalingTerms, setting: ServiceSetting
) -> Iterator[ObjectiveCost]:
    for factor in FACTORS:
        ttft, gap = _scale(terms.ttft, factor), _scale(terms.token_gap, factor)
        own = replace(
            setting,
            ttft_s=setting.ttft_s if ttft is None else ttft.limit_s,
            token_gap_s=setting.token_gap_s if gap is None else gap.limit_s,
        )
        controller = AutoscalerController(replace(terms, ttft=ttft, token_gap=gap), interval_s=1)
        score = run_service("cavvy", trace, own, controller, [on_demand_market(own)])
        answers = controller.answers
        counts = [(at, ready + starting) for at, ready, starting, _ in score.history]
        hours = max(trace.length_s, 1.0) / 3600
        yield ObjectiveCost(
            factor=factor,
            ttft=ttft,
            token_gap=gap,
            ttft_s=_find_quantile(answers.first_s, ttft),
            gap_s=_find_quantile(answers.gaps_s, gap),
            best_ttft_s=None if controller.goals is None else controller.goals.best_ttft_s,
            best_gap_s=None if controller.goals is None else controller.goals.best_gap_s,
            late=answers.describe().late / len(trace.arrivals_s),
            replicas=(
                min((count for _, count in counts), default=0),
                score.replica_hours / hours,
                score.most,
            ),
            limited=controller.limited,
            replica_hours=score.replica_hours,
            usd_hr=score.usd / hours,
            history=tuple(counts),
        )


def _scale(goal: LatencyGoal | None, factor: float) -> LatencyGoal | None:
    return None if goal is None else replace(goal, limit=goal.limit * factor)


def _find_quantile(values: Sequence[float], goal: LatencyGoal | None) -> float:
    share = 0.95 if goal is None else goal.share
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
