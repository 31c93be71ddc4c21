"""Reads the file of `cavvy decide`: a plan of costs (see `cost_plan`), or a task file, with what
the work needs.

    kind: training            # training, batch or service
    peak: 3                   # the highest use / the mean use
    predictable: 80%          # the share of the use that is known in advance
    data: {gb: 5000, at: aws/us-east-1, usd_gb: 0.09}  # a price if the catalog has none
    residency: [eu]
    users: {at: [de], latency_ms: 50}
    skills: [cloud, hardware]
    preemption: refused       # or tolerated
    start_within_days: 14
    deadline_hours: 72    # from now, for training and batches
    work_hours: 20        # of these machines, without interruptions
    model_gb: 6           # memory that the model needs
    edge: {price_usd: 2000, power_kw: 0.1, speed: 5%, memory_gb: 16}  # speed: of one machine
    weights: {cost: 6, latency: 2}
"""

from collections.abc import Mapping, Sequence
from datetime import date
from enum import StrEnum
from math import isfinite

from cavvy.capabilities.choose.cost_plan import CostPlanError, CostPlanFile, read_cost_table
from cavvy.capabilities.choose.decision import ASSUMED_ON, CRITERIA, SKILLS
from cavvy.catalog.regions import is_known_place, list_known_places, locate
from cavvy.catalog.residency import find_cloud
from cavvy.domain.facts import Fact
from cavvy.domain.values import Struct, field, replace
from cavvy.spec.problems import nearest
from cavvy.spec.tree import read_scalar, read_table

_OWN = (
    *("kind", "peak", "predictable", "data", "residency", "users", "skills", "preemption"),
    *("start_within_days", "deadline_hours", "work_hours", "model_gb", "edge", "weights"),
)
_EDGE = ("price_usd", "power_kw", "speed", "memory_gb")


class WorkKind(StrEnum):
    TRAINING = "training"
    BATCH = "batch"
    SERVICE = "service"


class PricedDevice(Struct, frozen=True, kw_only=True):
    """A device at the edge. `speed` is its speed as a share of that of one machine of the plan."""

    price_usd: float
    power_kw: float
    speed: float
    memory_gb: float


class DecisionFile(Struct, frozen=True, kw_only=True):
    """What the file states. Amounts are None if it does not state them. `stated` has the source and
    the day of each value that is not assumed, by its first name; `edge_missing` the values that an
    edge device needs and that are not stated."""

    plan: CostPlanFile
    stated: Mapping[str, tuple[str, date]] = field(default_factory=dict)
    kind: WorkKind = WorkKind.TRAINING
    peak: float = 1.0
    predictable: float = 1.0
    data_gb: float = 0.0
    data_at: str = ""
    data_usd_gb: float | None = None
    residency: Sequence[str] = ()
    users: Sequence[str] = ()
    latency_ms: float | None = None
    skills: frozenset[str] | None = None
    preemption: bool = True
    start_within_days: float | None = None
    deadline_hours: float | None = None
    work_hours: float | None = None
    model_gb: float | None = None
    edge: PricedDevice | None = None
    edge_missing: Sequence[str] = ()
    weights: Mapping[str, float] = field(default_factory=lambda: CRITERIA)

    def make_fact(self, stated: str, fact: str, value: float, unit: str, assumed: str) -> Fact:
        """Return a fact whose source is what states the value `stated`, or else an assumption."""
        source, as_of = self.stated.get(stated, (f"assumed by Cavvy: {assumed}", ASSUMED_ON))
        return Fact(name=fact, value=value, unit=unit, source=source, as_of=as_of)


def read_decision(
    text: str,
    file: str,
    changes: Mapping[str, str],
    days: tuple[date, date],
    found: Mapping[str, object] | None = None,
) -> DecisionFile:
    """Return what a file says, with values such as data.gb replaced by `changes`. `days` are the
    days of the file and of the changes. `found` are values that a task file states in its own
    words. Raises CostPlanError, SpecError.
    """
    data = read_table(text, file)
    if not data:
        raise CostPlanError(
            f"{file}: expected a table of values",
            "begin with `gpu: H100:8`, `machines: 2` and `use: 40%`",
        )
    if is_task(data):
        data = _translate_task(data) | dict(found or {})
    for name, value in changes.items():
        _set(data, name, value)
    stated = {name: (file, days[0]) for name in _OWN if name in data}
    changed = {name.partition(".")[0] for name in changes}
    stated |= {name: ("--set", days[1]) for name in _OWN if name in changed}
    own = {name: data.pop(name) for name in _OWN if name in data}
    plan = read_cost_table(data, file, days[0], _OWN)
    given = {
        name: replace(each, source="--set", as_of=days[1]) if name in changes else each
        for name, each in plan.given.items()
    }
    return _DecisionReader(own, file).read(replace(plan, given=given), stated)


def is_task(data: Mapping[str, object]) -> bool:
    """Return whether the values of a file are those of a task, and not of a plan."""
    return "run" in data


def _translate_task(data: Mapping[str, object]) -> dict[str, object]:
    """Return the values that a task file states. Use and machines are assumptions to be changed."""
    resources = data.get("resources")
    stated = resources if isinstance(resources, dict) else {}
    found: dict[str, object] = {
        "name": data.get("name"),
        "gpu": stated.get("gpu"),
        "machines": data.get("nodes", 1),
        "residency": stated.get("regions"),
        "kind": "service" if "service" in data else "training",
    }
    return {name: value for name, value in found.items() if value is not None}


def _set(data: dict[str, object], name: str, text: str) -> None:
    table, _, key = name.rpartition(".")
    target = data
    if table:
        inner = data.setdefault(table, {})
        if not isinstance(inner, dict):
            raise CostPlanError(f"{name}: {table} is not a table")
        target = inner
    target[key] = _read_change(name, text)


def _read_change(name: str, text: str) -> object:
    """Return a value of --set: YAML in brackets or braces, or else words with commas."""
    if text.lstrip()[:1] in ("[", "{"):
        read = read_table(f"value: {text}", f"--set {name}")
        if read is None or set(read) != {"value"}:
            raise CostPlanError(f"--set {name}: expected one value of YAML, not {text!r:.60}")
        return read["value"]
    return [part.strip() for part in text.split(",")] if "," in text else read_scalar(text)


class _DecisionReader:
    """Reads the values of `_OWN`, each with its bounds."""

    def __init__(self, own: Mapping[str, object], file: str) -> None:
        self._own, self._file = own, file

    def read(self, plan: CostPlanFile, stated: Mapping[str, tuple[str, date]]) -> DecisionFile:
        data = self._table("data", ("gb", "at", "usd_gb"))
        users = self._table("users", ("at", "latency_ms"))
        edge, missing = self._edge()
        gb = self._number("data.gb", data.get("gb"), 0, 1e9) or 0.0
        at = self._place(data.get("at"))
        if bool(gb) != bool(at):
            absent, other = ("data.at", "data.gb") if gb else ("data.gb", "data.at")
            raise CostPlanError(
                f"{self._file}: {absent} is missing beside {other}",
                "for example data: {gb: 5000, at: aws/us-east-1}, or `at: own`",
            )
        hours = {
            name: self._number(name, self._own.get(name), 0.01, 1e6)
            for name in ("deadline_hours", "work_hours")
        }
        kind = WorkKind(self._word("kind", [*WorkKind], WorkKind.TRAINING))
        if kind is WorkKind.SERVICE and hours["deadline_hours"] is not None:
            raise CostPlanError(
                f"{self._file}: deadline_hours: a service has no end",
                "omit it, or set kind to training or batch",
            )
        return DecisionFile(
            plan=plan,
            stated=stated,
            kind=kind,
            peak=self._number("peak", self._own.get("peak"), 1, 1000) or 1.0,
            predictable=self._share("predictable"),
            data_gb=gb,
            data_at=at,
            data_usd_gb=self._number("data.usd_gb", data.get("usd_gb"), 0, 10),
            residency=self._words("residency", self._own.get("residency")),
            users=self._users(users.get("at")),
            latency_ms=self._number("users.latency_ms", users.get("latency_ms"), 0.1, 1e5),
            skills=self._skills(),
            preemption=self._word("preemption", ["tolerated", "refused"], "tolerated")
            == "tolerated",
            start_within_days=self._number(
                "start_within_days", self._own.get("start_within_days"), 0, 3650
            ),
            deadline_hours=hours["deadline_hours"],
            work_hours=hours["work_hours"],
            model_gb=self._number("model_gb", self._own.get("model_gb"), 0.001, 1e6),
            edge=edge,
            edge_missing=missing,
            weights=self._weights(),
        )

    def _edge(self) -> tuple[PricedDevice | None, Sequence[str]]:
        """Return the device, or None and the values that are missing."""
        given = self._table("edge", _EDGE)
        bounds = {"price_usd": (1, 1e7), "power_kw": (0, 1000), "speed": (1e-6, 100)}
        read = {
            name: self._number(f"edge.{name}", given.get(name), *bounds.get(name, (0.001, 1e6)))
            for name in _EDGE
        }
        known = {name: value for name, value in read.items() if value is not None}
        missing = [f"edge.{name}" for name in _EDGE if name not in known]
        missing += ["model_gb"] if "model_gb" not in self._own else []
        return (None, missing) if missing else (PricedDevice(**known), ())

    def _users(self, value: object) -> tuple[str, ...]:
        """Return countries, areas or regions that the table of regions knows."""
        words = self._words("users.at", value)
        for word in words:
            if not is_known_place(word) and locate("", word)[0] is None:
                close = nearest(word, list_known_places())
                raise CostPlanError(
                    f"{self._file}: users.at: there is no country or area {word[:60]!r}",
                    f"did you mean {close}?" if close else "write ISO codes such as de, or eu, us",
                )
        return words

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
        provider, slash, region = (value or "").partition("/")
        return f"{find_cloud(provider)}{slash}{region}"

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
