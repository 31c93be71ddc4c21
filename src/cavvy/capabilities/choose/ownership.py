"""Forecasts what the same work costs on rented machines, on own machines, and on a mix of both.

All amounts are US dollars, rates per machine and hour, and a month has 730 hours (8,760 hours a
year / 12), as in the price lists of clouds. A machine is one node; work is measured in machines
that are busy on average. Own machines do what they can (machines x availability), and the rest is
rented. The formulas:

* value of an own machine of age a: price x residual^(a / life), the declining balance method;
* power: machines x kW x (idle + (1 - idle) x use) x PUE x hours x tariff;
* present value of an amount in month m: amount / (1 + capital rate)^(m / 12).

Taxes are not included. Purchases are paid when they are made; machines that are younger than their
life at the end of the plan are sold at their value.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import cache
from math import expm1, inf, log1p
from typing import Protocol

from cavvy.catalog.tables import read_table
from cavvy.domain.values import Struct

HOURS_PER_MONTH = 730.0
_STEPS = 60  # halvings of an interval in which a root is searched
_TORNADO = 12  # rows of a tornado


class CostAssumption(Struct, frozen=True, kw_only=True):
    """A value of a plan with its range, its source and the day of the source. `low` and `high` are
    equal to the value if the value is certain. `least` and `most` are the bounds of valid values.
    `weak` is true if the source is an assumption or a page that names no data.
    """

    name: str
    value: float
    low: float
    high: float
    least: float
    most: float
    unit: str
    source: str
    as_of: date | None = None
    weak: bool = False


class OwnershipPlan(Struct, frozen=True, kw_only=True):
    """The values of a plan, by name."""

    name: str
    assumptions: Mapping[str, CostAssumption]

    @property
    def values(self) -> Mapping[str, float]:
        return {name: each.value for name, each in self.assumptions.items()}


class OptionForecast(Struct, frozen=True, kw_only=True):
    """What one option costs. `kinds` are the costs over the whole plan, by kind; `monthly` is the
    present value of all costs until the end of each month, without the sale at the end, and
    `present` the present value of all costs. `rented` is the share of the work on rented machines.
    """

    name: str
    machines: float
    kinds: Mapping[str, float]
    monthly: Sequence[float]
    present: float
    rented: float

    @property
    def total(self) -> float:
        return sum(self.kinds.values())


class OwnershipForecast(Struct, frozen=True, kw_only=True):
    """The options, and when and where they break even.

    `break_even_months` is the time after which owning has cost less than renting, or None if this
    is not within the plan. `break_even_use` is the use of a machine above which owning costs less
    over the whole plan: 0 if it always does, None if it never does.
    """

    options: Sequence[OptionForecast]
    break_even_months: float | None
    break_even_use: float | None

    def find(self, name: str) -> OptionForecast:
        return next(each for each in self.options if each.name == name)

    @property
    def cheapest(self) -> OptionForecast:
        return min(self.options, key=lambda each: each.present)


class TornadoRow(Struct, frozen=True, kw_only=True):
    """The present value of owning minus renting at the low and the high value of an assumption."""

    assumption: CostAssumption
    at_low: float
    at_high: float

    @property
    def span(self) -> float:
        return abs(self.at_high - self.at_low)


class CostSpread(Struct, frozen=True, kw_only=True):
    """The spread of random plans: percentiles of the present value by option, and the share of the
    plans in which owning costs less than renting."""

    runs: int
    percentiles: Mapping[str, tuple[float, float, float]]  # 5, 50 and 95 %
    owning_wins: float


class RandomNumbers(Protocol):
    def triangular(self, low: float, high: float, mode: float) -> float: ...


@cache
def list_assumptions() -> Mapping[str, CostAssumption | None]:
    """Return the default of each value of a plan, by name; None if the plan must state it."""
    return {row["name"]: _read_default(row) for row in read_table(__package__, "assumptions")}


@cache
def list_meanings() -> Mapping[str, str]:
    """Return what each value means that has no default, with an example."""
    rows = read_table(__package__, "assumptions")
    return {row["name"]: row["meaning"] for row in rows if row["meaning"]}


@cache
def list_bounds() -> Mapping[str, tuple[float, float, str]]:
    """Return the least and the most of each value, and its unit."""
    return {
        row["name"]: (float(row["least"]), float(row["most"]), row["unit"])
        for row in read_table(__package__, "assumptions")
    }


def _read_default(row: Mapping[str, str]) -> CostAssumption | None:
    if not row["value"]:
        return None
    value = float(row["value"])
    return CostAssumption(
        name=row["name"],
        value=value,
        low=float(row["low"] or value),
        high=float(row["high"] or value),
        least=float(row["least"]),
        most=float(row["most"]),
        unit=row["unit"],
        source=row["source"],
        as_of=date.fromisoformat(row["as_of"]) if row["as_of"] else None,
        weak=bool(row["weak"]),
    )


def forecast_ownership(plan: OwnershipPlan) -> OwnershipForecast:
    """Return the costs of all options, and where they break even."""
    values = plan.values
    options = [_forecast(values, name) for name in _list_options(values)]
    return OwnershipForecast(
        options=options,
        break_even_months=find_break_even(options[1].monthly, options[0].monthly),
        break_even_use=_find_use(values),
    )


def _list_options(values: Mapping[str, float]) -> list[str]:
    """Return the options; a mix of no own machines or of own machines only is none."""
    mixed = 0 < values["mixed.machines"] < values["machines"]
    return ["cloud", "owned", *(["mixed"] if mixed else [])]


def _count_owned(values: Mapping[str, float], option: str) -> float:
    match option:
        case "cloud":
            return 0.0
        case "mixed":
            return values["mixed.machines"]
    return values["machines"]


def _forecast(values: Mapping[str, float], option: str) -> OptionForecast:
    owned = _count_owned(values, option)
    months = max(1, round(values["years"] * 12))
    kinds: dict[str, float] = {}
    monthly, running, work, rented = [], 0.0, 0.0, 0.0
    for month in range(months):
        amounts, served, rest = _list_amounts(values, owned, month)
        factor = _discount(values, month)
        for kind, amount in amounts.items():
            kinds[kind] = kinds.get(kind, 0.0) + amount
            running += amount * factor
        monthly.append(running)
        work, rented = work + served + rest, rented + rest
    sale = -_resale(values, owned, months)
    if sale:
        kinds["sale at the end"] = sale
    return OptionForecast(
        name=option,
        machines=owned,
        kinds=kinds,
        monthly=monthly,
        present=running + sale * _discount(values, months),
        rented=rented / work if work else 0.0,
    )


def _discount(values: Mapping[str, float], month: int) -> float:
    return float((1 + values["owned.capital_rate"]) ** (-month / 12))


def _list_amounts(
    values: Mapping[str, float], owned: float, month: int
) -> tuple[Mapping[str, float], float, float]:
    """Return the amounts of one month by kind, the work of own machines and the work of rented
    ones, both in busy machines."""
    demand = values["machines"] * values["use"] * (1 + values["growth"]) ** (month / 12)
    served = min(demand, owned * values["owned.availability"])
    amounts = _rent(values, demand - served, owned < values["machines"], month)
    if owned:
        amounts |= _own(values, owned, served / owned, month)
    egress = "owned.egress_usd_gb" if owned >= values["machines"] else "cloud.egress_usd_gb"
    amounts["egress"] = values["cloud.egress_gb_month"] * values[egress]
    return amounts, served, demand - served


def _rent(
    values: Mapping[str, float], rest: float, committed: bool, month: int
) -> dict[str, float]:
    """Return the costs of rented machines. Reserved machines are paid in every hour, and take the
    work first; if all machines are own ones, nothing is reserved."""
    trend = (1 + values["cloud.price_trend"]) ** (month / 12)
    reserved = values["cloud.reserved_machines"] if committed else 0.0
    left = max(0.0, rest - reserved)
    spot = left * values["cloud.spot_share"]
    overhead = 1 + values["cloud.spot_overhead"]
    rates = {
        "reserved machines": reserved * values["cloud.reserved_usd_hr"],
        "spot machines": spot * overhead * values["cloud.spot_usd_hr"] * trend,
        "machines on demand": (left - spot) * values["cloud.on_demand_usd_hr"] * trend,
    }
    stored = values["cloud.storage_gb"] * values["cloud.storage_usd_gb_month"]
    amounts = {kind: rate * HOURS_PER_MONTH for kind, rate in rates.items()}
    return amounts | {"storage": stored if rest or committed else 0.0}


def _own(values: Mapping[str, float], owned: float, use: float, month: int) -> dict[str, float]:
    """Return the costs of own machines in a month."""
    price, kw = values["owned.price_usd"], values["owned.power_kw"]
    idle = values["owned.idle_share"]
    energy = owned * kw * (idle + (1 - idle) * use) * values["owned.pue"] * HOURS_PER_MONTH
    staff = owned * values["owned.staff_per_machine"] * values["owned.staff_usd_year"]
    bought = price * owned if _is_bought(values, month) else 0.0
    return {
        "purchase": bought + (values["owned.setup_usd"] * owned if month == 0 else 0.0),
        "spares": values["owned.spares"] * price * owned if month == 0 else 0.0,
        "sale of old machines": -values["owned.residual"] * bought if month else 0.0,
        "power": energy * values["owned.tariff_usd_kwh"],
        "cooling": owned * values["owned.cooling_usd_year"] / 12,
        "space": owned * kw * values["owned.space_usd_kw_year"] / 12,
        "network": owned * values["owned.network_usd_year"] / 12,
        "staff": staff / 12,
        "maintenance": owned * price * values["owned.maintenance"] / 12,
    }


def _life_months(values: Mapping[str, float]) -> int:
    return max(1, round(values["owned.life_years"] * 12))


def _is_bought(values: Mapping[str, float], month: int) -> bool:
    return month % _life_months(values) == 0


def _resale(values: Mapping[str, float], owned: float, months: int) -> float:
    """Return the value of the own machines at the end of the plan."""
    life = _life_months(values)
    age = months % life or life
    return owned * values["owned.price_usd"] * float(values["owned.residual"] ** (age / life))


def find_break_even(owned: Sequence[float], rented: Sequence[float]) -> float | None:
    """Return the months after which the sums of `owned` are below those of `rented` until the end,
    with a part of the month; None if they are not below at the end. Purchases are made at the
    beginning of a month, and other costs grow evenly over it.
    """
    last = next(
        (month for month in reversed(range(len(owned))) if owned[month] > rented[month]), -1
    )
    if last == len(owned) - 1:
        return None
    if last < 0:
        return _divide(owned[0], rented[0])
    before, after = owned[last] - rented[last], owned[last + 1] - rented[last + 1]
    return last + 1 + before / (before - after)


def _divide(owned: float, rented: float) -> float:
    """Return the part of the first month after which owning is cheaper."""
    return min(1.0, owned / rented) if rented > 0 else 0.0


def _difference(values: Mapping[str, float]) -> float:
    """Return the present value of owning minus that of renting."""
    return _present(values, "owned") - _present(values, "cloud")


def _present(values: Mapping[str, float], option: str) -> float:
    """Return the present value of an option, as `_forecast` does. Without growth, the costs of a
    month are those of the first, and rents follow their trend: their sums are geometric."""
    if values["growth"]:
        return _forecast(values, option).present
    owned, months = _count_owned(values, option), max(1, round(values["years"] * 12))
    amounts, _, _ = _list_amounts(values, owned, 0)
    trending = amounts["spot machines"] + amounts["machines on demand"]
    once = amounts.get("purchase", 0.0) + amounts.get("spares", 0.0)
    constant = sum(amounts.values()) - trending - once
    factor = _discount(values, 1)
    trend = float((1 + values["cloud.price_trend"]) ** (1 / 12))
    total = once + constant * _sum_powers(factor, months)
    total += trending * _sum_powers(factor * trend, months)
    again = owned * values["owned.price_usd"] * (1 - values["owned.residual"])
    for month in range(_life_months(values), months, _life_months(values)):
        total += again * _discount(values, month)
    return total - _resale(values, owned, months) * _discount(values, months)


def _sum_powers(base: float, count: int) -> float:
    """Return base^0 + base^1 + ... with `count` terms."""
    more = base - 1
    if abs(more) > 0.1:
        return (1 - base**count) / -more
    return expm1(count * log1p(more)) / more if more else count


def _find_use(values: Mapping[str, float]) -> float | None:
    low, high = 0.0, 1.0
    if _difference({**values, "use": low}) <= 0:
        return 0.0
    if _difference({**values, "use": high}) > 0:
        return None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _difference({**values, "use": middle}) > 0 else (low, middle)
    return high


def make_tornado(plan: OwnershipPlan) -> list[TornadoRow]:
    """Return how the uncertain assumptions change the result one by one, the largest first."""
    rows = [
        TornadoRow(
            assumption=each,
            at_low=_difference({**plan.values, name: each.low}),
            at_high=_difference({**plan.values, name: each.high}),
        )
        for name, each in plan.assumptions.items()
        if each.low < each.high
    ]
    found = [row for row in rows if row.span > 0.5]
    return sorted(found, key=lambda row: (-row.span, row.assumption.name))[:_TORNADO]


def simulate_ownership(
    plan: OwnershipPlan, numbers: RandomNumbers, runs: Iterable[int]
) -> CostSpread:
    """Draw every uncertain assumption from a triangular distribution between its low and its high
    value, independently of the others, and forecast the options each time, once for each of
    `runs`."""
    found: dict[str, list[float]] = {name: [] for name in _list_options(plan.values)}
    for _ in runs:
        values = {
            name: numbers.triangular(each.low, each.high, each.value)
            if each.low < each.high
            else each.value
            for name, each in plan.assumptions.items()
        }
        for name, presents in found.items():
            presents.append(_present(values, name))
    wins = sum(own < rent for own, rent in zip(found["owned"], found["cloud"], strict=True))
    return CostSpread(
        runs=len(found["cloud"]),
        percentiles={name: _percentiles(values) for name, values in found.items()},
        owning_wins=wins / len(found["cloud"]),
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    five, half, most = (ordered[round(last * part)] for part in (0.05, 0.5, 0.95))
    return five, half, most


def find_change(plan: OwnershipPlan, name: str) -> float | None:
    """Return the value of an assumption, within its valid bounds, at which owning and renting cost
    the same, or None if there is none. It is the one nearest to the plan's value."""
    each, values = plan.assumptions[name], plan.values

    def differ(value: float) -> float:
        return _difference({**values, name: value})

    now = differ(each.value)
    best, distance = None, inf
    for end in (each.least, min(each.most, max(10 * each.value, 1.0))):
        if now * differ(end) < 0:
            near, far = each.value, end
            for _ in range(_STEPS):
                middle = (near + far) / 2
                near, far = (middle, far) if now * differ(middle) > 0 else (near, middle)
            if abs(far - each.value) < distance:
                best, distance = far, abs(far - each.value)
    return best
