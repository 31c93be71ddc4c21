"""The pictures of `cavvy diagram`, drawn from the values that they are given."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from cavvy.catalog.accelerators import Precision, list_accelerators
from cavvy.cli.view.drawing import Box, ChartPoint, draw_bars, draw_boxes, draw_points
from cavvy.costs.comparison import ComparedAccelerator
from cavvy.domain.offers import Purchase

_SHOWN = 14  # bars of a chart
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


def draw_costs(rows: Iterable[ComparedAccelerator]) -> str:
    """Draw the lowest prices of the accelerators that most providers sell, on spot and on
    demand."""
    found: dict[str, list[ComparedAccelerator]] = {}
    for row in rows:
        if row.price(Purchase.ON_DEMAND) is not None:
            found.setdefault(row.accelerator, []).append(row)
    sold = sorted(found, key=lambda name: (-len(found[name]), name))[:_SHOWN]
    bars = []
    for name in sold:
        usual = _lowest(found[name], Purchase.ON_DEMAND) or 0.0
        spot = _lowest(found[name], Purchase.SPOT)
        parts = {"on demand, no spot price": usual}
        if spot is not None and spot < usual:
            parts = {"lowest on spot": spot, "more, on demand": usual - spot}
        bars.append((name, parts))
    bars.sort(key=lambda bar: sum(bar[1].values()))
    return draw_bars("Lowest price of one accelerator and hour", bars, "USD")


def _lowest(rows: Iterable[ComparedAccelerator], purchase: Purchase) -> float | None:
    prices = [price for row in rows if (price := row.price(purchase)) is not None]
    return min(prices, default=None)


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
    edge = ("cavvy join", "any machine that", "reaches the server") if joined else ("none",)
    boxes = [
        Box("user", 0, 1, "cavvy, SDK, console", ("one task file",), 0),
        Box("server", 1, 1, "Cavvy server", ("queue, budgets,", "placement, bills"), 1),
        Box("own", 2, 0, "own machines", tuple(_wrap(own)), 2),
        Box("cloud", 2, 1, f"{len(clouds)} clouds and services", tuple(_wrap(clouds)), 3),
        Box("edge", 2, 2, "edge", edge, 4),
    ]
    links = [
        ("user", "server", "HTTPS"),
        ("server", "own", "SSH"),
        ("server", "cloud", "API"),
        ("server", "edge", ""),
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
