"""Completes plans of costs with prices of the catalog, data sheets and recorded use."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.capabilities.choose.comparison import DATA_SHEETS_READ
from cavvy.capabilities.choose.cost_plan import (
    CostPlanError,
    CostPlanFile,
    UseTrace,
    complete_plan,
    make_assumption,
    read_cost_plan,
)
from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.facts import Fact
from cavvy.domain.offers import Offer, Purchase
from cavvy.spec import SpecError, read_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cavvy.capabilities.choose.ownership import CostAssumption, OwnershipPlan
    from cavvy.client.wire import MarketListing
    from cavvy.domain.tasks import AcceleratorNeed

_PERIOD = timedelta(days=30)  # of recorded use
_PRICE_RANGE = 0.2  # of cloud prices, for the spread; assumed, as no source states one
# power of the CPUs, fans and network cards of a server for eight GPUs: a DGX H100 draws at most
# 10.2 kW (its user guide), of which its GPUs are 8 x 0.7 kW by their data sheet
_OTHER_POWER = 10.2 / 5.6
_CHECKPOINT_S = 1800.0  # time between checkpoints and for a restart that spot overheads assume
_RESTART_S = 300.0


def load_cost_plan(path: str) -> "OwnershipPlan":
    """Read and complete a plan. Raises CommandFailure."""
    try:
        text = read_file(Path(path))
        day = datetime.fromtimestamp(Path(path).stat().st_mtime, UTC).date()
        read = read_cost_plan(text, path, day)
        return complete_plan(read, find_values(read, Path(path).parent))
    except CostPlanError as error:
        raise CommandFailure(str(error), error.hint, 2) from error
    except SpecError as error:
        raise CommandFailure(str(error), exit_code=2) from error


def find_values(read: CostPlanFile, folder: Path) -> "dict[str, CostAssumption]":
    """Return what the plan does not state but other sources do. Raises CommandFailure,
    CostPlanError."""
    found = {"cloud.spot_overhead": _expect_overhead(None)}
    if isinstance(read.use, UseTrace):
        found["use"] = _use_of_trace(read.use, folder)
    elif read.use is not None:
        found["use"] = _recorded_use(read)
    if read.gpu:
        found |= _find_prices(read)
    return found


def _expect_overhead(seen: "MarketListing | None") -> "CostAssumption":
    """Return the share of time that preemptions cost on spot: each repeats half of the time between
    checkpoints, and a restart. `seen` is what this installation has seen of the market."""
    from cavvy.planner.risk import SPOT_PREEMPTIONS_PER_HOUR

    rate, source = (
        SPOT_PREEMPTIONS_PER_HOUR,
        "Can't Be Late, NSDI 2024, the prior of the market model",
    )
    if seen is not None and seen.node_hours:
        rate = seen.preemptions_per_hour
        source = (
            f"{seen.taken} preemptions in {seen.node_hours:.0f} node-hours here, with the prior"
        )
    lost = rate * (_CHECKPOINT_S / 2 + _RESTART_S) / 3600
    return make_assumption(
        "cloud.spot_overhead",
        round(lost, 4),
        f"{rate:.3g} preemptions an hour ({source}) x (half of {_CHECKPOINT_S / 60:g} min between "
        f"checkpoints + {_RESTART_S / 60:g} min)",
        low=0.0,
        high=round(3 * lost, 4),
        as_of=date(2024, 4, 16) if seen is None else datetime.now(UTC).date(),
    )


def _use_of_trace(trace: UseTrace, folder: Path) -> "CostAssumption":
    """Run the jobs of a trace through the queue's policy, and return the share of GPU hours that
    they use."""
    try:
        from cavvy.capabilities.simulation.traces.fleet import read_jobs, read_pools, run_fleet
        from cavvy.capabilities.simulation.traces.readers import TraceError
    except ModuleNotFoundError as error:
        raise CostPlanError(
            "use: a trace needs the capability simulation, which is not installed",
            "state `use` as a number",
        ) from error

    jobs, pools = folder / trace.jobs, folder / trace.pools
    try:
        result = run_fleet(read_jobs(jobs), read_pools(pools, trace.gpus_per_node))
    except TraceError as error:
        raise CostPlanError(str(error)) from error
    except OSError as error:
        raise CostPlanError(f"use: {error.filename}: {error.strerror}") from error
    if not result.jobs:
        raise CostPlanError(f"use: {jobs} has no job that fits the pools of {pools}")
    return make_assumption(
        "use",
        result.gpu_use,
        f"{result.jobs:,} jobs of {trace.jobs} through `cavvy simulate fleet` (mean wait "
        f"{result.mean_wait_s / 3600:.1f} h)",
        as_of=datetime.fromtimestamp(jobs.stat().st_mtime, UTC).date(),
    )


def _recorded_use(read: CostPlanFile) -> "CostAssumption":
    """Return the hours of machines that this installation was charged for in the last 30 days, as a
    share of the plan's machines."""
    from cavvy.cli.reach.session import session
    from cavvy.cli.reach.usage import list_used_machines, read_charges

    until = datetime.now(UTC)
    with session() as client:
        used = list_used_machines(read_charges(client, None, until - _PERIOD, until))
    hours = sum(((each.until - each.since) / timedelta(hours=1) for each in used), 0.0)
    machines = read.given["machines"].value if "machines" in read.given else 0.0
    if not hours or not machines:
        raise CostPlanError(
            "use: no machine was charged on demand in the last 30 days",
            "state `use` as a number, or name a trace",
        )
    return make_assumption(
        "use",
        min(1.0, hours / (machines * (_PERIOD / timedelta(hours=1)))),
        f"{hours:,.1f} machine-hours in the ledger of this installation",
        as_of=until.date(),
    )


def _find_prices(read: CostPlanFile) -> "dict[str, CostAssumption]":
    """Return the lowest prices for the plan's machine at one provider, the egress price there, and
    the power by the data sheet. Raises CostPlanError, CommandFailure."""
    from cavvy.catalog.accelerators import find_accelerator
    from cavvy.cli.task.market import seen_here

    offers = find_machine_offers(read)
    usual = next((each for each in offers if each.purchase is Purchase.ON_DEMAND), None)
    if usual is None and "cloud.on_demand_usd_hr" not in read.given:
        raise CostPlanError(
            f"gpu: no offer on demand has {read.gpu}",
            f"`cavvy offers --gpu {read.gpu}` shows the nearest, or state cloud.on_demand_usd_hr",
        )
    chosen = _choose_offers(read, offers)
    found = _list_prices(chosen)
    spot, usual = chosen.get(Purchase.SPOT), chosen.get(Purchase.ON_DEMAND)
    if spot and (seen := seen_here().get(spot.key)):
        found["cloud.spot_overhead"] = _expect_overhead(seen)
    if usual is not None and (egress := _find_egress(usual)):
        found["cloud.egress_usd_gb"] = egress
    need = _parse_gpu(read)[0]
    known = find_accelerator((usual.accelerator if usual else need.name) or "")
    if known and known.accelerator.tdp_w:
        row, count = known.accelerator, need.count_min
        found["owned.power_kw"] = make_assumption(
            "owned.power_kw",
            round(count * row.tdp_w * _OTHER_POWER / 1000, 3) if row.tdp_w else 0.0,
            f"{count} x {row.tdp_w} W ({row.source}) x {_OTHER_POWER:.2f}, the ratio of a DGX "
            "H100 (10.2 kW, its user guide) to its GPUs",
            as_of=DATA_SHEETS_READ,
        )
    return found


def _choose_offers(read: CostPlanFile, offers: "Sequence[Offer]") -> "dict[Purchase, Offer]":
    """Return an offer of each purchase option, all of one provider: the cheapest on demand among
    those with all options that the plan uses. A commitment in the region and to the type of that on
    demand comes first, and none is longer than the plan. Raises CostPlanError."""
    from cavvy.capabilities.choose.ownership import list_assumptions

    years = read.given.get("years") or list_assumptions()["years"]
    fitting = [each for each in offers if each.term_months <= (years.value if years else 1) * 12]
    used = {"": Purchase.ON_DEMAND, "cloud.spot_share": Purchase.SPOT}
    used["cloud.reserved_machines"] = Purchase.RESERVED
    wanted = {
        purchase
        for share, purchase in used.items()
        if f"cloud.{purchase.replace('-', '_')}_usd_hr" not in read.given
        and (not share or (share in read.given and read.given[share].value))
    }
    by_provider: dict[str, list[Offer]] = {}
    for each in sorted(
        fitting, key=lambda e: (e.purchase is not Purchase.ON_DEMAND, e.rate, e.key)
    ):
        by_provider.setdefault(each.provider, []).append(each)
    for own in by_provider.values():
        if wanted <= {each.purchase for each in own}:
            first = own[0]
            chosen: dict[Purchase, Offer] = {}
            for each in sorted(own, key=lambda e: (_is_elsewhere(e, first), e.rate, e.key)):
                chosen.setdefault(each.purchase, each)
            return chosen
    if not wanted:
        return {}
    raise CostPlanError(
        f"gpu: no provider has {read.gpu} with all options of the plan: "
        f"{', '.join(sorted(wanted))}",
        "`cavvy offers --spot` and `--reserved` list them; or state cloud.spot_usd_hr or "
        "cloud.reserved_usd_hr",
    )


def _is_elsewhere(offer: Offer, first: Offer) -> bool:
    """Return whether an offer with a commitment is for another machine or region than `first`."""
    same = (offer.region, offer.instance_type) == (first.region, first.instance_type)
    return bool(offer.term_months) and not same


def _list_prices(chosen: "Mapping[Purchase, Offer]") -> "dict[str, CostAssumption]":
    return {
        name: make_assumption(
            name,
            usd,
            f"{best.source}: {best.key}",
            low=usd * (1 - _PRICE_RANGE),
            high=usd * (1 + _PRICE_RANGE),
            as_of=best.as_of,
        )
        for purchase, best in chosen.items()
        for usd in [float(best.rate.usd)]
        for name in [f"cloud.{purchase.replace('-', '_')}_usd_hr"]
    }


def find_machine_offers(read: CostPlanFile) -> "Sequence[Offer]":
    """Return the offers to rent the plan's machine, the cheapest first: those with exactly the
    named accelerator, as an H100 is not an H100-PCIe, or else with its family. Raises
    CostPlanError, CommandFailure."""
    from cavvy.catalog.accelerators import find_accelerator
    from cavvy.catalog.tpu_slices import spread_slices
    from cavvy.cli.task.market import list_offers
    from cavvy.domain.tasks import ResourceSpec, SpotPolicy

    need = ResourceSpec(
        accelerators=_parse_gpu(read),
        spot=SpotPolicy.AUTO,
        providers=tuple(read.providers),
        regions=tuple(read.regions),
    )
    if (hosts := spread_slices(need).hosts) > 1:
        raise CostPlanError(
            f"gpu: {read.gpu} is a slice of {hosts} machines",
            "a plan counts machines: name the largest slice of one host, such as TPU-v5e:8, and "
            "state the number of machines",
        )
    offers = [each for each in list_offers(need) if not each.owned and each.rate.micros_per_hour]
    known = [find_accelerator(each.name) for each in need.accelerators if each.name]
    names = {each.accelerator.name for each in known if each}
    return [each for each in offers if each.accelerator in names] or offers


def _parse_gpu(read: CostPlanFile) -> "tuple[AcceleratorNeed, ...]":
    from cavvy.catalog.needs import NeedError, parse_accelerator

    try:
        return parse_accelerator(read.gpu)
    except NeedError as error:
        raise CostPlanError(f"gpu: {error}", error.hint or "") from error


def read_egress() -> "Mapping[str, Fact]":
    """Return the price of a GB that leaves for the internet, by provider/region and by provider,
    and of one that goes to another region of the cloud, by provider/place>target, as
    `find_move_price` reads them. Raises CommandFailure."""
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.layout import SnapshotError

    try:
        with CatalogSnapshot.open() as snapshot:
            rows = list(snapshot.egress_rows())
    except SnapshotError as error:
        raise CommandFailure(str(error)) from error
    return {
        (f"{provider}/{region}" if region else provider)
        + ("" if target == "internet" else f">{target}"): Fact(
            name="egress",
            value=float(price.usd),
            unit="USD per GB",
            source=f"{source}: {provider} {region or 'all regions'}"
            + ("" if target == "internet" else f" to another region ({target})"),
            as_of=as_of,
        )
        for provider, region, target, price, source, as_of in rows
    }


def _find_egress(offer: Offer) -> "CostAssumption | None":
    prices = read_egress()
    found = prices.get(f"{offer.provider}/{offer.region}") or prices.get(offer.provider)
    if found is None:
        return None
    return make_assumption("cloud.egress_usd_gb", found.value, found.source, as_of=found.as_of)
