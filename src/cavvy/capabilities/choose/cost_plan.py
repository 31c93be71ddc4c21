"""Reads the YAML file of `cavvy tco`: values of a plan, each a number or a table with the number,
its range and its source.

* CostPlanError   the user must change the file; the message says where and what was expected
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from difflib import get_close_matches
from math import isfinite

from cavvy.capabilities.choose.ownership import (
    CostAssumption,
    OwnershipPlan,
    list_assumptions,
    list_bounds,
    list_meanings,
)
from cavvy.domain.values import Struct, replace
from cavvy.spec.tree import read_table

_TABLES = ("owned", "cloud", "mixed")
_TEXTS = ("name", "gpu", "cloud.providers", "cloud.regions")
_NUMBER_KEYS = ("value", "low", "high", "source", "as_of")
_TRACE_KEYS = ("jobs", "pools", "gpus_per_node")
_HOURS = 24


class CostPlanError(ValueError):
    """Raised if the file is not a valid plan. `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UseTrace(Struct, frozen=True, kw_only=True):
    """The files of a recorded queue whose use of GPUs is the use of the plan's machines."""

    jobs: str
    pools: str
    gpus_per_node: int


class CostPlanFile(Struct, frozen=True, kw_only=True):
    """What the file states. `use` is a trace, or "recorded" for the machines that this installation
    used, or None if the file states a number."""

    name: str
    given: Mapping[str, CostAssumption]
    gpu: str = ""
    providers: Sequence[str] = ()
    regions: Sequence[str] = ()
    use: UseTrace | str | None = None


def read_cost_plan(text: str, file: str, day: date | None = None) -> CostPlanFile:
    """Return what a file says. `day` is the date of values whose date it does not state. Raises
    CostPlanError, SpecError.
    """
    data = read_table(text, file)
    if not data:
        raise CostPlanError(
            f"{file}: expected a table of values",
            "begin with `machines: 4`, `use: 60%`, and tables `owned` and `cloud`",
        )
    return read_cost_table(data, file, day)


def read_cost_table(
    data: Mapping[str, object], file: str, day: date | None = None, others: Iterable[str] = ()
) -> CostPlanFile:
    """Like `read_cost_plan`, for a file that was parsed already. `others` are further values that
    the file may state."""
    flat = _flatten(data, file, others)
    given = dict[str, CostAssumption]()
    use: UseTrace | str | None = None
    for name, value in flat.items():
        if name == "use" and (value == "recorded" or _is_trace(value)):
            use = _read_trace(value, file) if isinstance(value, dict) else "recorded"
        elif name not in _TEXTS:
            read = _read_value(name, value, file)
            given[name] = replace(read, as_of=read.as_of or day)
    texts = {name: _read_texts(name, flat[name], file) for name in _TEXTS if name in flat}
    return CostPlanFile(
        name=", ".join(texts.get("name", (file,))),
        given=given,
        gpu="|".join(texts.get("gpu", ())),
        providers=texts.get("cloud.providers", ()),
        regions=texts.get("cloud.regions", ()),
        use=use,
    )


def complete_plan(read: CostPlanFile, found: Mapping[str, CostAssumption]) -> OwnershipPlan:
    """Return the plan with the values of the file, then those that were found elsewhere, then the
    defaults. Raises CostPlanError if a value is missing, or values contradict each other.
    """
    known = {**list_assumptions(), **found, **read.given}
    if known.get("mixed.machines") is not None and "mixed.machines" not in read.given:
        half = known["machines"].value / 2 if known["machines"] else 0.0
        known["mixed.machines"] = make_assumption(
            "mixed.machines",
            float(int(half)),
            "assumed by Cavvy: half of the machines",
            as_of=known["machines"].as_of if known["machines"] else None,
        )
    missing = [name for name, each in known.items() if each is None]
    if missing:
        hint = explain_missing(missing)
        if read.gpu and "owned.power_kw" in missing:
            hint = (
                f"no data sheet in the catalog states the power of {read.gpu}: state the kW of a "
                "machine. What is not sold, such as TPUs, is only rented: `cavvy compare` lists "
                "its prices"
            )
        raise CostPlanError(
            f"{read.name}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            hint,
        )
    complete = {name: each for name, each in known.items() if each is not None}
    if complete["cloud.egress_gb_month"].value and "cloud.egress_usd_gb" not in {
        **found,
        **read.given,
    }:
        raise CostPlanError(
            f"{read.name}: the price of the egress of cloud.egress_gb_month is unknown",
            "state cloud.egress_usd_gb, or `gpu` at a provider with a price in the catalog",
        )
    _check_together(read.name, complete)
    return OwnershipPlan(name=read.name, assumptions=complete)


def explain_missing(names: Iterable[str]) -> str:
    """Return a hint that says what each of these missing values means, with an example."""
    meanings = list_meanings()
    return "\n".join(f"{name} is {meanings[name]}" for name in names if name in meanings)


def _check_together(name: str, known: Mapping[str, CostAssumption]) -> None:
    machines, use = known["machines"].value, known["use"].value
    available = known["owned.availability"].value
    if use > available:
        raise CostPlanError(
            f"{name}: use is {use:g}, but own machines can work in {available:g} of the hours",
            f"expected at most {available:g}; or set owned.availability",
        )
    for key in ("mixed.machines", "cloud.reserved_machines"):
        if known[key].value > machines:
            raise CostPlanError(
                f"{name}: {key} is {known[key].value:g}, but the plan has {machines:g} machines",
                f"expected at most {machines:g}",
            )
    for share, rate in (
        ("cloud.spot_share", "cloud.spot_usd_hr"),
        ("cloud.reserved_machines", "cloud.reserved_usd_hr"),
    ):
        if known[share].value and not known[rate].value:
            raise CostPlanError(
                f"{name}: {share} is {known[share].value:g}, but {rate} is missing",
                f"set {rate}, or `gpu` to read prices from the catalog",
            )


def _flatten(data: Mapping[str, object], file: str, others: Iterable[str]) -> dict[str, object]:
    """Return the values by their full names. Raises CostPlanError for unknown names."""
    flat: dict[str, object] = {}
    for key, value in data.items():
        if key not in _TABLES:
            flat[key] = value
        elif isinstance(value, dict):
            flat |= {f"{key}.{inner}": each for inner, each in value.items()}
        else:
            raise CostPlanError(f"{file}: {key}: expected a table of values, not {value!r:.60}")
    names = [*list_assumptions(), *_TEXTS]
    for name in flat:
        if name not in names:
            known = [*others, *names]
            close = get_close_matches(name, known, n=1)
            close = close or get_close_matches(name.partition(".")[0], known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise CostPlanError(f"{file}: there is no value {name[:60]!r}", hint)
    return flat


def _read_texts(name: str, value: object, file: str) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(each, str) and each.strip() for each in texts):
        raise CostPlanError(f"{file}: {name}: expected a name or names, not {value!r:.60}")
    return tuple(str(each).strip() for each in texts)


def _is_trace(value: object) -> bool:
    return isinstance(value, dict) and not {"value"} & value.keys()


def _read_trace(value: Mapping[str, object], file: str) -> UseTrace:
    gpus = value.get("gpus_per_node", 8)
    jobs, pools = value.get("jobs"), value.get("pools")
    if not isinstance(jobs, str) or not isinstance(pools, str) or set(value) - {*_TRACE_KEYS}:
        raise CostPlanError(
            f"{file}: use: expected a number, `recorded`, or a table with the files of a trace",
            "for example use: {jobs: jobs.csv, pools: pools.csv, gpus_per_node: 8}",
        )
    if not isinstance(gpus, int) or isinstance(gpus, bool) or not 1 <= gpus <= 1024:
        raise CostPlanError(f"{file}: use.gpus_per_node: expected 1 to 1024, not {gpus!r:.60}")
    return UseTrace(jobs=jobs, pools=pools, gpus_per_node=gpus)


def _read_value(name: str, value: object, file: str) -> CostAssumption:
    if name == "owned.tariff_usd_kwh" and isinstance(value, list):
        return _read_tariff(name, value, file)
    if not isinstance(value, dict):
        return make_assumption(name, _read_number(name, value, file), file)
    if unknown := [key for key in value if key not in _NUMBER_KEYS]:
        raise CostPlanError(
            f"{file}: {name}: there is no {str(unknown[0])[:60]!r}",
            f"expected {', '.join(_NUMBER_KEYS)}",
        )
    number = _read_number(name, value.get("value"), file)
    low, high = (
        _read_number(f"{name}.{end}", value[end], file, name) if end in value else number
        for end in ("low", "high")
    )
    if not low <= number <= high:
        raise CostPlanError(
            f"{file}: {name}: the value {number:g} is not between low ({low:g}) and high ({high:g})"
        )
    source = value.get("source", file)
    if not isinstance(source, str):
        raise CostPlanError(f"{file}: {name}.source: expected a text, not {source!r:.60}")
    as_of = _read_date(name, value.get("as_of"), file)
    return make_assumption(name, number, source, low=low, high=high, as_of=as_of)


def _read_date(name: str, value: object, file: str) -> date | None:
    try:
        return None if value is None else date.fromisoformat(str(value))
    except ValueError:
        message = f"{file}: {name}.as_of: expected a day such as 2026-11-27, not {value!r:.60}"
        raise CostPlanError(message) from None


def _read_number(place: str, value: object, file: str, name: str = "") -> float:
    """Return a number within the bounds of the value `name`; 60% is 0.6."""
    least, most, unit = list_bounds()[name or place]
    number = value
    if isinstance(value, str) and value.endswith("%") and value[:-1].strip().isascii():
        try:
            number = float(value[:-1]) / 100
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise CostPlanError(
            f"{file}: {place}: expected a number ({unit}), not {value!r:.60}",
            f"write a number from {least:g} to {most:g}",
        )
    if not isfinite(number) or not least <= number <= most:
        raise CostPlanError(
            f"{file}: {place}: expected {least:g} to {most:g} ({unit}), not {number:g}"
        )
    if (name or place).endswith("machines") and number != int(number):
        raise CostPlanError(f"{file}: {place}: expected a whole number, not {number:g}")
    return float(number)


def _read_tariff(name: str, rows: Sequence[object], file: str) -> CostAssumption:
    """Return the mean price over a day. The rows must cover each hour once."""
    prices: dict[int, float] = {}
    for row in rows:
        if not isinstance(row, dict) or set(row) != {"from", "to", "usd_kwh"}:
            raise CostPlanError(
                f"{file}: {name}: expected rows such as {{from: 8, to: 20, usd_kwh: 0.18}}"
            )
        begin, end = row["from"], row["to"]
        if not all(isinstance(each, int) and 0 <= each <= _HOURS for each in (begin, end)):
            raise CostPlanError(f"{file}: {name}: expected hours from 0 to 24, not {row!r:.60}")
        price = _read_number(f"{name}.usd_kwh", row["usd_kwh"], file, name)
        length = (end - begin) % _HOURS or _HOURS
        for hour in range(begin, begin + length):
            if hour % _HOURS in prices:
                raise CostPlanError(f"{file}: {name}: the hour {hour % _HOURS} has two prices")
            prices[hour % _HOURS] = price
    if len(prices) != _HOURS:
        hour = next(each for each in range(_HOURS) if each not in prices)
        raise CostPlanError(f"{file}: {name}: the hour {hour} has no price")
    return make_assumption(name, sum(prices.values()) / _HOURS, f"{file}, the mean of a day")


def make_assumption(
    name: str,
    value: float,
    source: str,
    *,
    low: float | None = None,
    high: float | None = None,
    as_of: date | None = None,
) -> CostAssumption:
    """Return a value of a plan with its bounds and its unit."""
    least, most, unit = list_bounds()[name]
    return CostAssumption(
        name=name,
        value=value,
        low=value if low is None else low,
        high=value if high is None else high,
        least=least,
        most=most,
        unit=unit,
        source=source,
        as_of=as_of,
    )
