"""`cavvy decide`: recommends a place for work, with the runner-up and what would change the
answer."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.task.load import param_option, read_params
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.output import TableColumn, json_option, json_out, rows_out, text_out

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cavvy.capabilities.choose.decision import (
        PlaceDecision,
        PlaceOption,
        RankedPlace,
        WorkNeeds,
    )
    from cavvy.capabilities.choose.decision_file import DecisionFile
    from cavvy.capabilities.choose.place_options import Market
    from cavvy.domain.facts import Fact
    from cavvy.domain.tasks import TaskSpec

_FILE = click.Path(dir_okay=False, path_type=Path)
_ROWS = 8
_NAME, _NAME_PX = 44, 330  # characters of a name in a picture, and their width
_EXAMPLES = {"machines": "1", "use": "40%"}
_NO_CHANGE = "No other weight or cost alone would change the answer."
# the value in the file, the question and the usual answer; "-" leaves the value out
_QUESTIONS = (
    ("gpu", "Accelerators of a machine, such as H100:8", "H100:8"),
    ("machines", "Machines", "1"),
    ("use", "Share of the hours that they work", "40%"),
    ("kind", "training, batch or service", "training"),
    ("preemption", "Preemptions: tolerated or refused", "tolerated"),
    ("residency", "Country or area where data must stay (- for any)", "-"),
    ("data", "Data, such as {gb: 5000, at: aws/us-east-1} (- for none)", "-"),
    ("owned", "Own machines, such as {price_usd: 300000} (- for none)", "-"),
)
_FOR_SERVICES = (
    ("model_gb", "Memory that the model needs in GB, for edge devices (- for no edge)", "-"),
    (
        "edge",
        "Edge device, such as {price_usd: 2000, power_kw: 0.1, speed: 5%, memory_gb: 16}, with its "
        "share of a machine's speed (- for none)",
        "-",
    ),
)
_FOR_OTHERS = (
    ("deadline_hours", "Hours from now until the work must be done (- for any)", "-"),
    ("work_hours", "Hours that these machines work without interruption (- if unknown)", "-"),
)


@click.command("decide")
@click.argument("file", metavar="[TASK.YAML]", required=False, type=click.Path(dir_okay=False))
@click.option(
    "--set",
    "changes",
    metavar="NAME=VALUE",
    multiple=True,
    help="A value, such as use=40%, data.gb=5000 or weights.cost=2; repeatable.",
)
@param_option
@click.option("--report", type=_FILE, help="Write a report: .html, or .pdf by Chromium.")
@json_option
def command(
    file: str | None,
    changes: tuple[str, ...],
    param: tuple[str, ...],
    report: Path | None,
    output: str,
) -> None:
    """Decide between clouds, own machines, edge devices and serverless replicas.

    TASK.YAML is a task file or a plan of costs, with what the work needs; the reference page
    "Comparing, owning, deciding" lists the values. Each point names its fact and the date of the
    fact. Without a file, the command asks a few questions.

    \b
      cavvy decide train.yaml --set machines=2 --set use=40% --set owned.price_usd=300000
    """
    from cavvy.capabilities.choose.cost_plan import CostPlanError
    from cavvy.capabilities.choose.decision import decide_place
    from cavvy.spec import SpecError

    try:
        given = read_params(changes, "--set", "use=40%")
        asked, task = _read(file, given, read_params(param))
        file = file or "your answers"
        market = _find_market(asked, file, task)
        options, needs = _list_options(asked, market)
    except CostPlanError as error:
        raise CommandFailure(str(error), error.hint, 2) from error
    except SpecError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    made = _add_use(decide_place(options, needs, asked.weights), market)
    if report is not None:
        from cavvy.capabilities.choose.report import write_report

        write_report(report, _make_report(made, asked))
    advice = _advise(made, task)
    if output == "json":
        json_out({**_make_document(made, asked), "advice": [advice] if advice else []})
    else:
        _show(made, advice)
    if not made.ranked:
        raise CommandFailure("every option breaks a requirement", "relax one of those listed above")
    if made.answer is None:
        raise CommandFailure(
            f"there is no place to compare {made.ranked[0].option.name} with, so this is no answer",
            "allow other providers, or state what the places listed above lack",
        )


def _ask() -> str:
    """Ask what the work is like, and return a file with the answers. Raises CommandFailure if there
    is no terminal."""
    from cavvy.cli.task.submission import may_ask

    if not may_ask():
        raise CommandFailure(
            "no file says what the work needs, and there is no terminal to ask at",
            "name a task file or a plan, such as `cavvy decide train.yaml`, or answer the questions"
            " in a terminal",
            2,
        )
    answers = {name: click.prompt(text, default=usual) for name, text, usual in _QUESTIONS}
    more = _FOR_SERVICES if answers["kind"] == "service" else _FOR_OTHERS
    answers |= {name: click.prompt(text, default=usual) for name, text, usual in more}
    return "".join(f"{name}: {value}\n" for name, value in answers.items() if value != "-")


def _read(
    file: str | None, given: "Mapping[str, str]", params: "Mapping[str, str]"
) -> "tuple[DecisionFile, TaskSpec | None]":
    """Read the file, or ask, and check the names of places. Raises CostPlanError, SpecError,
    CommandFailure."""
    from cavvy.capabilities.choose.decision_file import is_task, read_decision
    from cavvy.capabilities.choose.place_options import describe_task
    from cavvy.cli.task.load import read_task
    from cavvy.cli.task.profiles import with_rates
    from cavvy.spec import read_file
    from cavvy.spec.tree import read_table
    from cavvy.task_files import ReadOptions

    now = datetime.now(UTC)
    if params and (file is None or not is_task(read_table(read_file(Path(file)), file) or {})):
        where = f"{file}: " if file else ""
        raise CommandFailure(f"{where}--param is for task files", "change a plan with --set", 2)
    if file is None:
        asked = read_decision(_ask(), "your answers", given, (now.date(), now.date()))
        _check_places(asked, "your answers")
        return asked, None
    text, task = read_file(Path(file)), None
    day = datetime.fromtimestamp(Path(file).stat().st_mtime, UTC).date()
    if is_task(data := read_table(text, file) or {}):
        options = ReadOptions(serves="service" in data)
        task = with_rates(read_task(file, params, options).task, Path(file).parent)
    found = describe_task(task, now) if task else {}
    asked = read_decision(text, file, given, (day, now.date()), found)
    _check_places(asked, file)
    return asked, task


def _check_places(asked: "DecisionFile", file: str) -> None:
    """Refuse places that neither the catalog nor the table of regions knows. Raises CostPlanError,
    CommandFailure."""
    from cavvy.capabilities.choose.cost_plan import CostPlanError
    from cavvy.cli.task.unknown import unknown_names
    from cavvy.domain.tasks import ResourceSpec
    from cavvy.spec.problems import nearest
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.layout import SnapshotError

    provider, _, region = asked.data_at.partition("/")
    try:
        with CatalogSnapshot.open() as snapshot:
            names = {"residency": ResourceSpec(regions=tuple(asked.residency))}
            if provider not in ("", "own"):
                names["data.at"] = ResourceSpec(providers=(provider,))
            for name, need in names.items():
                if unknown := unknown_names(snapshot, need):
                    raise CostPlanError(f"{file}: {name}: {unknown}")
            known = {each for owner, each, _ in snapshot.regions() if owner == provider}
    except SnapshotError as error:
        raise CommandFailure(str(error)) from error
    if region and region not in known:
        close = nearest(region, known)
        raise CostPlanError(
            f"{file}: data.at: {provider} has no region {region[:60]!r}",
            f"did you mean {provider}/{close}?"
            if close
            else "`cavvy offers -o wide` lists regions",
        )


def _find_market(asked: "DecisionFile", file: str, task: "TaskSpec | None") -> "Market":
    """Raises CostPlanError, CommandFailure."""
    from cavvy.capabilities.choose.cost_plan import CostPlanError, complete_plan, explain_missing
    from cavvy.capabilities.choose.ownership import list_assumptions
    from cavvy.capabilities.choose.place_options import Market
    from cavvy.capabilities.choose.plan_values import find_machine_offers, find_values, read_egress
    from cavvy.domain.facts import Fact

    if not asked.plan.gpu:
        raise CostPlanError(f"{file}: gpu is missing", "state the machine, such as `gpu: H100:8`")
    found = find_values(asked.plan, Path(file).parent)
    defaults = {name: each for name, each in list_assumptions().items() if each is not None}
    known = {**defaults, **found, **asked.plan.given}
    if missing := [name for name in ("machines", "use") if name not in known]:
        hint = f"{explain_missing(missing)}\nor add --set {missing[0]}={_EXAMPLES[missing[0]]}"
        raise CostPlanError(f"{file}: {missing[0]} is missing", hint)
    overhead = known["cloud.spot_overhead"]
    return Market(
        offers=find_machine_offers(asked.plan),
        egress=read_egress(),
        machines=known["machines"].value,
        use=known["use"].value,
        overhead=Fact(
            name="work that is repeated",
            value=overhead.value,
            unit="of the work",
            source=overhead.source,
            as_of=overhead.as_of,
        ),
        tariff=known["owned.tariff_usd_kwh"],
        life_years=known["owned.life_years"],
        plan=complete_plan(asked.plan, found) if "owned.price_usd" in known else None,
        task=task,
    )


def _list_options(asked: "DecisionFile", market: "Market") -> "tuple[list[PlaceOption], WorkNeeds]":
    from cavvy.capabilities.choose.decision import SKILLS, WorkNeeds
    from cavvy.capabilities.choose.place_options import list_places

    everything = frozenset(each for skills in SKILLS.values() for each in skills)
    skills = everything if asked.skills is None else asked.skills
    deadline = asked.deadline_hours
    needs = WorkNeeds(
        predictable=asked.make_fact(
            "predictable", "predictable use", asked.predictable, "of the use", "all of it"
        ),
        peak=asked.make_fact("peak", "peak / mean use", asked.peak, "", "even use"),
        deadline=None
        if deadline is None
        else asked.make_fact("deadline_hours", "deadline", deadline, "h from now", ""),
        skills=skills,
        skills_source=asked.make_fact(
            "skills", "skills at hand", float(len(skills)), "skills", "all are at hand"
        ),
    )
    return list_places(asked, market), needs


def _add_use(made: "PlaceDecision", market: "Market") -> "PlaceDecision":
    """Add the use above which own machines cost less than renting, if their price is known."""
    from cavvy.capabilities.choose.decision import TurningPoint
    from cavvy.capabilities.choose.ownership import forecast_ownership
    from cavvy.domain.values import replace

    at = forecast_ownership(market.plan).break_even_use if market.plan else None
    if at is None:
        return made
    what = "use above which own machines cost less than renting on demand"
    point = TurningPoint(what=what, now=market.use, at=at, unit="of the hours")
    return replace(made, turning=[*made.turning, point])


def _advise(made: "PlaceDecision", task: "TaskSpec | None") -> str:
    """Return what spot with checkpoints would save, as `cavvy plan` says it."""
    from cavvy.cli.task.available import PlanRequest, advise_spot, gather
    from cavvy.planner.placements import RankingView
    from cavvy.planner.rank import plan

    if task is None or made.answer is None or task.service is not None:
        return ""
    now = datetime.now(UTC)
    only = PlanRequest(now=now, view=RankingView(limit=1))
    offered = gather(task, anywhere=True, output_mib=None, only=only)
    best = plan(
        task, offered.offers, now=now, situation=offered.situation, view=only.view
    ).placements
    return advise_spot(task, next(iter(best), None), now, market=offered.market)


def _show(made: "PlaceDecision", advice: str) -> None:
    for title, place in (("Answer", made.answer), ("Runner-up", made.runner_up)):
        if place is not None:
            text_out(f"{title}: {_name(made, place)}, ${_monthly(place):,.0f} a month")
    if advice:
        text_out(f"hint: {advice}")
    click.echo()
    columns = [
        TableColumn("place", wrap=True),
        TableColumn("score", show=lambda value: f"{value:.3f}"),
        TableColumn("usd_month", "USD/MONTH", show=lambda value: f"{value:,.0f}"),
    ]
    rows = [(each.option.name, each.score, _monthly(each)) for each in _list_shown(made)]
    rows_out(columns, rows, empty="no option meets the requirements")
    for title, place in (("Answer", made.answer), ("Runner-up", made.runner_up)):
        if place is None:
            continue
        click.echo()
        text_out(f"The points of the {title.lower()}, {place.option.name}:")
        points = [
            (
                each.criterion,
                f"{each.score:.2f}",
                _say(each.fact),
                str(each.fact.as_of or "no date"),
            )
            for each in place.points
        ]
        rows_out(
            ["criterion", "score", TableColumn("fact", wrap=True), TableColumn("date")], points
        )
    if made.turning:
        click.echo("\nThe answer would change with:")
        rows_out(
            ["change", "now", "at", "unit"],
            [
                (each.what, round(each.now, 2), round(each.at, 2), each.unit)
                for each in made.turning
            ],
        )
    elif made.answer:
        click.echo(f"\n{_NO_CHANGE}")
    for each in made.excluded:
        text_out(f"not possible: {each.name}: {'; '.join(each.refusals)}")


def _monthly(place: "RankedPlace") -> float:
    """Return the costs of a month in dollars."""
    return place.option.monthly.value + place.option.moves.value


def _name(made: "PlaceDecision", place: "RankedPlace") -> str:
    """Return the name of a place, with the requirements that the runner-up breaks."""
    if place is not made.runner_up or not made.lifted:
        return place.option.name
    return f"{place.option.name}, if these requirements are lifted: {'; '.join(made.lifted)}"


def _list_shown(made: "PlaceDecision") -> "list[RankedPlace]":
    """Return the best places, and the best of each kind."""
    best = {each.option.kind: each for each in reversed(made.ranked)}
    shown = [*made.ranked[:_ROWS]]
    return shown + [each for each in best.values() if each not in shown]


def _cut(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"


def _say(fact: "Fact") -> str:
    formula = f" = {fact.formula}" if fact.formula else ""
    unit = f" {fact.unit}" if fact.unit else ""
    value = f"{fact.value:,.0f}" if abs(fact.value) >= 1000 else f"{fact.value:.4g}"
    return f"{fact.name} {value}{unit}{formula} ({fact.source})"


def _make_document(made: "PlaceDecision", asked: "DecisionFile") -> dict[str, object]:
    from cavvy.domain.values import asdict

    return {
        "answer": made.answer.option.name if made.answer else None,
        "runner_up": made.runner_up.option.name if made.runner_up else None,
        "lifted": list(made.lifted),
        "weights": dict(asked.weights),
        "ranked": [asdict(each) for each in made.ranked],
        "turning": [asdict(each) for each in made.turning],
        "excluded": [{"name": each.name, "reasons": list(each.refusals)} for each in made.excluded],
    }


def _make_report(made: "PlaceDecision", asked: "DecisionFile") -> str:
    from cavvy.capabilities.choose.decision import OptionKind
    from cavvy.capabilities.choose.diagrams import draw_decision
    from cavvy.capabilities.choose.drawing import draw_bars
    from cavvy.capabilities.choose.report import ReportSection, ReportTable, make_page

    total = sum(asked.weights.values())
    shown = _list_shown(made)
    bars = [
        (
            _cut(each.option.name),
            {p.criterion: p.score * asked.weights.get(p.criterion, 0) / total for p in each.points},
        )
        for each in shown
    ]
    named = [("Answer", made.answer), ("Runner-up", made.runner_up)]
    sections = [
        ReportSection(
            title="Decision",
            texts=[f"{title}: {_name(made, each)}" for title, each in named if each]
            + ([] if made.turning else [_NO_CHANGE]),
            pictures=[
                draw_bars("Scores", bars, "", left=_NAME_PX),
                draw_decision(asked.weights, [*map(str, OptionKind)]),
            ],
            table=ReportTable(
                heads=["what would change the answer", "now", "at", "unit"],
                rows=[(each.what, each.now, each.at, each.unit) for each in made.turning],
            ),
        ),
        ReportSection(
            title="Not possible",
            table=ReportTable(
                heads=["place", "why"],
                rows=[(each.name, "; ".join(each.refusals)) for each in made.excluded],
            ),
        ),
    ]
    return make_page(f"Decision: {asked.plan.name}", sections, _list_facts(made, asked))


def _list_facts(made: "PlaceDecision", asked: "DecisionFile") -> "list[Fact]":
    """Return the figures of the report: points of places, weights and turning points."""
    from cavvy.domain.facts import Fact
    from cavvy.domain.values import replace

    facts = [
        replace(point.fact, name=f"{each.option.name}: {point.criterion}: {point.fact.name}")
        for each in _list_shown(made)
        for point in each.points
    ]
    for name, weight in asked.weights.items():
        facts.append(asked.make_fact("weights", f"weight of {name}", weight, "", "as usual"))
    newest = max(each.as_of for each in facts if each.as_of)
    return facts + [
        Fact(
            name=each.what,
            value=value,
            unit=each.unit,
            source="computed from the figures of this report",
            as_of=newest,
            formula="" if value is each.now else "where both places have the same score",
        )
        for each in made.turning
        for value in (each.now, each.at)
    ]
