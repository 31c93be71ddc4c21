"""The pictures of `cavvy catalog diagram`, drawn from the values that they are given."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from cavvy.capabilities.choose.comparison import name_family, price_each
from cavvy.capabilities.choose.drawing import (
    Box,
    ChartPoint,
    draw_bars,
    draw_boxes,
    draw_matrix,
    draw_points,
)
from cavvy.catalog.accelerators import Precision, find_accelerator, list_accelerators
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import format_price

_SHOWN = 14  # bars of a chart
_COLUMNS = 8  # accelerators of the matrix of prices: those that most providers sell
_LINE = 30  # characters of a line in a box
_PEAKS = (Precision.BF16, Precision.FP16, Precision.FP32)


def draw_generations(names: Collection[str] | None = None) -> str:
    """Draw the peak rates of accelerators over the years of their announcements. `names` are the
    accelerators to draw; None means all."""
    points = []
    for row in list_accelerators():
        precision = next((each for each in _PEAKS if each in row.peak), None)
        if row.year and precision and (names is None or row.name in names):
            rate = row.peak[precision] / 1e12
            note = f"{row.name}, {row.year}: {rate:g} TFLOP/s ({precision}); {row.source}"
            points.append(ChartPoint(row.year, rate, row.name, str(row.vendor), note))
    return draw_points(
        "Generations of accelerators",
        points,
        "year of the announcement",
        "TFLOP/s, dense (bf16, or else fp16 or fp32)",
        scales=("range", "powers"),
    )


def draw_family_timeline(offers: Iterable[Offer]) -> str:
    """Draw the instance families of providers in the years in which their accelerators were
    announced."""
    rows: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for (provider, accelerator, family), offer in sorted(_list_families(offers).items()):
        known = find_accelerator(accelerator)
        if known is None or not known.accelerator.year:
            continue
        model = known.accelerator
        note = f"{family}: {accelerator}, {model.year}; {model.source}; {_say_source(offer)}"
        cells = rows.setdefault(provider, {}).setdefault(str(model.year), [])
        cells.append((family, note))
        cells.append((f"  {accelerator}", note))
    years = sorted({year for cells in rows.values() for year in cells})
    title = "Instance families, by the year in which their accelerators were announced"
    return draw_matrix(title, years, rows)


def draw_costs(offers: Iterable[Offer]) -> str:
    """Draw a matrix of providers and accelerators: the instance family with the lowest price of one
    accelerator on demand, and the lowest on spot, with dates and sources."""
    kinds = {Purchase.ON_DEMAND: "", Purchase.SPOT: "spot "}
    lowest: dict[tuple[str, str], dict[Purchase, Offer]] = {}
    for offer in _list_priced(offers):
        if offer.purchase in kinds:
            cell = lowest.setdefault((offer.provider, offer.accelerator or ""), {})
            best = cell.get(offer.purchase)
            if best is None or (price_each(offer), offer.key) < (price_each(best), best.key):
                cell[offer.purchase] = offer
    sellers = Counter(accelerator for _, accelerator in lowest)
    columns = sorted(sellers, key=lambda name: (-sellers[name], name))[:_COLUMNS]
    rows: dict[str, dict[str, list[tuple[str, str]]]] = {}
    sources: dict[str, set[str]] = {}
    for (provider, accelerator), cell in sorted(lowest.items()):
        if accelerator not in columns:
            continue
        lines = rows.setdefault(provider, {}).setdefault(accelerator, [])
        for purchase, offer in sorted(cell.items(), key=lambda item: [*kinds].index(item[0])):
            family = name_family(provider, offer.instance_type)
            price = f"{kinds[purchase]}{format_price(price_each(offer))}"
            source = _say_source(offer)
            note = f"{offer.instance_type} in {offer.region}, {price} an accelerator and hour; "
            if family not in {text for text, _ in lines}:
                lines.append((family, note + source))
            lines.append((price, note + source))
            sources.setdefault(provider, set()).add(source)
    notes = [f"{name}: {'; '.join(sorted(found))}" for name, found in sources.items()]
    title = "Lowest price of one accelerator and hour, on demand and on spot, and its family (USD)"
    return draw_matrix(title, columns, rows, notes)


def _list_families(offers: Iterable[Offer]) -> Mapping[tuple[str, str, str], Offer]:
    found: dict[tuple[str, str, str], Offer] = {}
    for offer in _list_priced(offers):
        family = name_family(offer.provider, offer.instance_type)
        found.setdefault((offer.provider, offer.accelerator or "", family), offer)
    return found


def _list_priced(offers: Iterable[Offer]) -> Iterable[Offer]:
    """Yield the offers with accelerators of providers that have instance families."""
    for offer in offers:
        rented = offer.rate.micros_per_hour and not offer.owned and offer.accelerator_count
        if rented and name_family(offer.provider, offer.instance_type):
            yield offer


def _say_source(offer: Offer) -> str:
    return f"{offer.source}, {offer.as_of}" if offer.as_of else offer.source


def draw_regions(regions: Iterable[tuple[str, str, str | None]]) -> str:
    """Draw the number of regions of each provider, by area. `regions` are provider, region and
    area."""
    counts: dict[str, Counter[str]] = {}
    for provider, _, area in regions:
        counts.setdefault(provider, Counter())[area or "unknown"] += 1
    bars = sorted(counts.items(), key=lambda item: (-item[1].total(), item[0]))
    areas = sorted({area for _, each in bars for area in each})
    rows = [(name, {area: float(each[area]) for area in areas}) for name, each in bars[:_SHOWN]]
    return draw_bars("Regions of providers", rows, "regions")


def draw_hybrid(own: Sequence[str], clouds: Sequence[str], joined: bool) -> str:
    """Draw where the nodes of one server can be: own machines, clouds and edge devices."""
    joins = ("cavvy nodes join: machines", "that reach the server") if joined else ()
    edge = ("cavvy edge: devices", "at sites, with models", "and rollouts", *joins)
    boxes = [
        Box("user", 0, 1, "cavvy, SDK, console", ("one task file",), 0),
        Box("server", 1, 1, "Cavvy server", ("queue, budgets,", "placement, bills"), 1),
        Box("own", 2, 0, "own machines", tuple(_wrap(own)), 2),
        Box("cloud", 2, 1, f"{len(clouds)} clouds and services", tuple(_wrap(clouds)), 3),
        Box("edge", 2, 2, "edge devices", edge, 4),
    ]
    links = [
        ("user", "server", "HTTPS"),
        ("server", "own", "SSH"),
        ("server", "cloud", "API"),
        ("server", "edge", "cavvy edge"),
    ]
    return draw_boxes("One server over own machines, clouds and edge", boxes, links)


def draw_containers(images: Collection[str], builds: Collection[str], total: int) -> str:
    """Draw how a container image reaches a node. `images` and `builds` are the providers that run
    images, and that can build an image on the node."""
    boxes = [
        Box("file", 0, 0, "image: in the task", ("a name, or a Dockerfile",), 0),
        Box(
            "build", 1, 0, "cavvy image build", ("or on the node at", f"{len(builds)} providers"), 1
        ),
        Box("registry", 2, 0, "registry", ("public, or with a", "secret of the task"), 2),
        Box("agent", 1, 1, "agent", ("mounts the working", "folder and devices"), 3),
        Box("node", 2, 1, "node", (f"images run at {len(images)}", f"of {total} providers"), 4),
    ]
    links = [
        ("file", "build", ""),
        ("build", "registry", "push"),
        ("registry", "node", "pull"),
        ("node", "agent", "starts in"),
    ]
    return draw_boxes("From a task to a container", boxes, links)


def draw_serverless(managed: Sequence[str], spot: int) -> str:
    """Draw how a service has no replica while it is not called. `managed` are the providers whose
    endpoints are replicas; `spot` is the number of providers that sell spot machines."""
    boxes = [
        Box("client", 0, 0, "request", ("API key",), 0),
        Box("gateway", 1, 0, "gateway", ("holds the request while", "no replica is ready"), 1),
        Box("replica", 2, 0, "replicas", ("0 to most", f"spot at {spot} providers"), 2),
        Box("scaler", 1, 1, "autoscaler", ("from the rate and", "length of requests"), 3),
        Box("managed", 2, 1, "managed endpoints", tuple(_wrap(managed)), 4),
    ]
    links = [
        ("client", "gateway", ""),
        ("gateway", "replica", "when ready"),
        ("gateway", "scaler", "demand"),
        ("scaler", "managed", ""),
    ]
    return draw_boxes("Serverless: replicas only while they are called", boxes, links)


def draw_decision(weights: Mapping[str, float], options: Sequence[str]) -> str:
    """Draw the criteria of `cavvy decide` with their weights, and the options among which it
    decides."""
    total = sum(weights.values()) or 1.0
    criteria = [f"{name} {weight / total:.0%}" for name, weight in weights.items()]
    boxes = [
        Box("task", 0, 0, "the work", ("task file, data,", "use, deadline"), 0),
        Box("must", 1, 0, "must hold", ("residency, deadline,", "latency"), 4),
        Box("weigh", 2, 0, "weighed criteria", tuple(criteria), 1),
        Box("facts", 1, 1, "facts", ("catalog, data sheets,", "own plan of costs"), 5),
        Box("options", 2, 1, "options", tuple(options), 2),
        Box("answer", 3, 0, "answer", ("and the runner-up", "and what changes it"), 3),
    ]
    links = [
        ("task", "must", ""),
        ("must", "weigh", ""),
        ("facts", "weigh", ""),
        ("options", "weigh", ""),
        ("weigh", "answer", ""),
    ]
    return draw_boxes("How a place is chosen", boxes, links)


def _wrap(names: Sequence[str]) -> list[str]:
    """Return the names as lines of a box, at most six."""
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + len(name) + 2 > _LINE:
            lines.append("")
        lines[-1] += f", {name}" if lines[-1] else name
    return [*lines[:5], "..."] if len(lines) > 6 else lines
