"""What the devices of a service answered, what the service answered them, and what both cost."""

from collections import Counter
from datetime import datetime, timedelta

from cavvy.capabilities.edge.on_device.front import LEAST_S
from cavvy.capabilities.edge.service import EdgeService
from cavvy.client.service_wire import EdgePathView
from cavvy.control.parts import KnownService
from cavvy.control.running_costs import sum_to_now
from cavvy.domain.figures import FIGURES_DAYS
from cavvy.store.base import LedgerFilter
from cavvy.store.sql import Store


async def view_paths(
    edge: EdgeService, store: Store, service: KnownService, now: datetime
) -> list[EdgePathView]:
    """Return what became of the requests to the devices of a service, and what they cost."""
    shown = []
    for rule, found in await edge.list_clouds(service):
        device, cloud = Counter[int](), Counter[int]()
        for each in found.paths:
            device.update(each.device)
            cloud.update(each.cloud)
        cloud_s = min(found.window_s, FIGURES_DAYS * 86_400)
        spent, answered = await _sum_window(store, service, now - timedelta(seconds=cloud_s), now)
        shown.append(
            EdgePathView(
                site=rule.site,
                model=rule.model,
                devices=found.devices,
                kept=found.kept,
                answered=device.total(),
                p50_s=_find_quantile(device, 0.5),
                p95_s=_find_quantile(device, 0.95),
                cloud_answered=cloud.total(),
                cloud_p50_s=_find_quantile(cloud, 0.5),
                cloud_p95_s=_find_quantile(cloud, 0.95),
                lost=sum(each.lost for each in found.paths),
                window_s=found.window_s,
                cloud_window_s=cloud_s,
                micros=None if found.spent is None else found.spent.micros,
                cloud_micros=spent if cloud_s else 0,
                cloud_requests=answered if cloud_s else 0,
            )
        )
    return shown


async def _sum_window(
    store: Store, service: KnownService, since: datetime, now: datetime
) -> tuple[int, int]:
    """Return what the replicas have cost since then, and how many requests they have answered."""
    which = LedgerFilter(
        projects=service.task.project, tag=("service", service.task.name), since=since
    )
    sums = await sum_to_now(store, which, (), now)
    names = ("requests_per_s", "failed_per_s")
    blocks = await store.figures.list(service.id, 0, since=since, until=now, names=names)
    answered, first = 0.0, since.timestamp() // 60
    for block in blocks:
        counts = [block.columns[each].mean for each in names if each in block.columns]
        for minute, requests, *failed in zip(block.minutes, *counts, strict=True):
            if minute >= first:
                answered += 60 * max(0.0, requests - sum(failed))
    return sums[0].amount.micros if sums else 0, round(answered)


def _find_quantile(buckets: Counter[int], share: float) -> float | None:
    """Return the time in seconds that this share of the answers did not exceed, or None without
    answers. It is at most 19 % above the truth."""
    wanted, seen = share * buckets.total(), 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= wanted and seen:
            return float(LEAST_S * 2 ** (bucket / 4))
    return None
