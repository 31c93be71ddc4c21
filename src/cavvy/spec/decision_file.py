"""Reads the file of `cavvy decide`: a plan of costs (see `cost_plan`), or a task file, with what
the work needs.

    kind: training            # training, batch or service
    peak: 3                   # the highest use / the mean use
    predictable: 80%          # the share of the use that is known in advance
    data: {gb: 5000, at: aws/us-east-1}
    residency: [eu]
    users: {at: [de], latency_ms: 50}
    skills: [cloud, hardware]
    preemption: refused       # or tolerated
    start_within_days: 14
    edge: {price_usd: 2000, power_kw: 0.1}
    weights: {cost: 6, latency: 2}
"""

from collections.abc import Mapping, Sequence
from datetime import date
from enum import StrEnum
from math import isfinite

from cavvy.costs.decision import CRITERIA, SKILLS
from cavvy.domain.values import Struct, field
from cavvy.spec.cost_plan import CostPlanError, CostPlanFile, read_cost_table
from cavvy.spec.tree import read_scalar, read_table

_OWN = (
    *("kind", "peak", "predictable", "data", "residency", "users", "skills", "preemption"),
    *("start_within_days", "edge", "weights"),
)


class WorkKind(StrEnum):
    TRAINING = "training"
    BATCH = "batch"
    SERVICE = "service"


class DecisionFile(Struct, frozen=True, kw_only=True):
    """What the file states. Amounts are None if it does not state them."""

    plan: CostPlanFile
    kind: WorkKind = WorkKind.TRAINING
    peak: float = 1.0
    predictable: float = 1.0
    data_gb: float = 0.0
    data_at: str = ""
    residency: Sequence[str] = ()
    users: Sequence[str] = ()
    latency_ms: float | None = None
    skills: frozenset[str] | None = None
    preemption: bool = True
    start_within_days: float | None = None
    edge_usd: float | None = None
    edge_kw: float = 0.0
    weights: Mapping[str, float] = field(default_factory=lambda: CRITERIA)


def read_decision(text: str, file: str, changes: Mapping[str, str], day: date) -> DecisionFile:
    """Return what a file says, with values such as data.gb replaced by `changes`. `day` is the
    date of values whose date the file does not state. Raises CostPlanError, SpecError.
    """
    data = read_table(text, file)
    if not data:
        raise CostPlanError(
            f"{file}: expected a table of values",
            "begin with `gpu: H100:8`, `machines: 2` and `use: 40%`",
        )
    if "run" in data:
        data = _translate_task(data)
    for name, value in changes.items():
        _set(data, name, value)
    own = {name: data.pop(name) for name in _OWN if name in data}
    plan = read_cost_table(data, file, day, _OWN)
    return _DecisionReader(own, file).read(plan)


def _translate_task(data: Mapping[str, object]) -> dict[str, object]:
    """Return the values that a task file states. Use and machines are assumptions to be changed."""
    resources = data.get("resources")
    stated = resources if isinstance(resources, dict) else {}
    found: dict[str, object] = {
        "name": data.get("name"),
        "gpu": stated.get("gpu"),
        "machines": data.get("nodes", 1),
        "residency": stated.get("regions"),
        "preemption": "refused" if stated.get("spot") == "never" else "tolerated",
        "kind": "service" if "service" in data else "training",
    }
    if "spot" not in stated and "checkpoint" not in data:
        found["preemption"] = "refused"
    return {name: value for name, value in found.items() if value is not None}


def _set(data: dict[str, object], name: str, text: str) -> None:
    table, _, key = name.rpartition(".")
    target = data
    if table:
        inner = data.setdefault(table, {})
        if not isinstance(inner, dict):
            raise CostPlanError(f"{name}: {table} is not a table")
        target = inner
    target[key] = [part.strip() for part in text.split(",")] if "," in text else read_scalar(text)


class _DecisionReader:
    """Reads the values of `_OWN`, each with its bounds."""

    def __init__(self, own: Mapping[str, object], file: str) -> None:
        self._own, self._file = own, file

    def read(self, plan: CostPlanFile) -> DecisionFile:
        data = self._table("data", ("gb", "at"))
        users = self._table("users", ("at", "latency_ms"))
        edge = self._table("edge", ("price_usd", "power_kw"))
        latency = self._number("users.latency_ms", users.get("latency_ms"), 0.1, 1e5)
        return DecisionFile(
            plan=plan,
            kind=WorkKind(self._word("kind", [*WorkKind], WorkKind.TRAINING)),
            peak=self._number("peak", self._own.get("peak"), 1, 1000) or 1.0,
            predictable=self._share("predictable"),
            data_gb=self._number("data.gb", data.get("gb"), 0, 1e9) or 0.0,
            data_at=self._place(data.get("at")),
            residency=self._words("residency", self._own.get("residency")),
            users=self._words("users.at", users.get("at")),
            latency_ms=latency,
            skills=self._skills(),
            preemption=self._word("preemption", ["tolerated", "refused"], "tolerated")
            == "tolerated",
            start_within_days=self._number(
                "start_within_days", self._own.get("start_within_days"), 0, 3650
            ),
            edge_usd=self._number("edge.price_usd", edge.get("price_usd"), 0, 1e7),
            edge_kw=self._number("edge.power_kw", edge.get("power_kw"), 0, 1000) or 0.0,
            weights=self._weights(),
        )

    def _table(self, name: str, keys: Sequence[str]) -> Mapping[str, object]:
        value = self._own.get(name, {})
        if not isinstance(value, dict) or set(value) - set(keys):
            raise CostPlanError(
                f"{self._file}: {name}: expected a table with {', '.join(keys)}, not {value!r:.60}"
            )
        return value

    def _number(self, name: str, value: object, least: float, most: float) -> float | None:
        if value is None:
            return None
        if isinstance(value, str) and value.endswith("%"):
            read = read_scalar(value[:-1].strip())
            value = read / 100 if isinstance(read, int | float) else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise CostPlanError(f"{self._file}: {name}: expected a number, not {value!r:.60}")
        if not least <= value <= most:
            raise CostPlanError(
                f"{self._file}: {name}: expected {least:g} to {most:g}, not {value:g}"
            )
        return float(value)

    def _share(self, name: str) -> float:
        value = self._number(name, self._own.get(name), 0, 1)
        return 1.0 if value is None else value

    def _words(self, name: str, value: object) -> tuple[str, ...]:
        words = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, str) and each.strip() for each in words):
            raise CostPlanError(f"{self._file}: {name}: expected names, not {value!r:.60}")
        return tuple(str(each).strip().lower() for each in words)

    def _word(self, name: str, known: Sequence[str], default: str) -> str:
        value = self._own.get(name, default)
        if value not in known:
            raise CostPlanError(
                f"{self._file}: {name}: expected {' or '.join(known)}, not {value!r:.60}"
            )
        return str(value)

    def _place(self, value: object) -> str:
        if value is not None and not isinstance(value, str):
            raise CostPlanError(
                f"{self._file}: data.at: expected PROVIDER/REGION or `own`, not {value!r:.60}"
            )
        return value or ""

    def _skills(self) -> frozenset[str] | None:
        if "skills" not in self._own:
            return None
        known = sorted({each for skills in SKILLS.values() for each in skills})
        words = self._words("skills", self._own["skills"])
        if unknown := [each for each in words if each not in known]:
            raise CostPlanError(
                f"{self._file}: skills: there is no skill {unknown[0][:60]!r}",
                f"known: {', '.join(known)}",
            )
        return frozenset(words)

    def _weights(self) -> Mapping[str, float]:
        given = self._table("weights", tuple(CRITERIA))
        weights = {
            name: default if value is None else value
            for name, default in CRITERIA.items()
            for value in [self._number(f"weights.{name}", given.get(name), 0, 1e6)]
        }
        if not sum(weights.values()):
            raise CostPlanError(f"{self._file}: weights: expected at least one above 0")
        return weights
