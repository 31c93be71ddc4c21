"""The editor of a task file: shows its problems by line, ranks the offers for each task, and runs
the tasks.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from msgspec import Raw, Struct
from msgspec.json import encode
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.catalog.accelerators import list_accelerators
from cavvy.catalog.needs import format_need
from cavvy.client import ApiClient, ApiError, make_key
from cavvy.client.paths import make_id, read_time
from cavvy.client.reruns import EarlierRun, NotRepeatable, read_run, show_param
from cavvy.client.service_wire import put_service
from cavvy.client.wire import (
    GraphRequest,
    JobListing,
    OfferView,
    PlacementView,
    SubmissionCheck,
    SubmitRequest,
)
from cavvy.console.pages import offers
from cavvy.console.pages.page import (
    Page,
    find_project,
    form_of,
    list_projects,
    path_of,
    services_by_replica,
    try_part,
    user_of,
)
from cavvy.console.pages.repository_file import NoFile, read_file
from cavvy.console.pages.task_form import read_form, write_form
from cavvy.domain.jobs import RunOrigin
from cavvy.spec import SpecError
from cavvy.spec.describe import describe_task
from cavvy.spec.fields.task import make_schema
from cavvy.spec.problems import SpecProblem
from cavvy.task_files import ParsedTask, ReadOptions, parse_file, parse_tasks

_FILE = "task.yaml"  # the name of the file in messages
_LONGEST = 256 << 10  # characters of a task file
_PLACEMENTS, _PLACEMENTS_EACH = 12, 4  # of a task alone, and of each of several
_LISTED = 10  # list prices
_EARLIER, _EARLIER_READ = 8, 40  # jobs to start from, and those among which they are found
_PARAM = "param."  # begins the names of the fields of parameters
_KEY_S = 600  # seconds after which a submission gets another key; the server refuses old keys
_STARTER = """\
name: hello
run: |
  nvidia-smi || true
  echo hello
"""


class _Draft(Struct, frozen=True, kw_only=True):
    """What the user has entered. `earlier` is the job of which this is a rerun."""

    text: str
    project: str
    name: str = ""
    params: Mapping[str, str] = {}
    earlier: EarlierRun | None = None
    source: str = ""  # PROJECT/ID of the earlier job
    recipe: str = ""  # the name of the recipe that is shown
    address: str = ""  # from which the text was read
    key: str = ""

    @property
    def options(self) -> ReadOptions:
        origin = self.earlier.origin if self.earlier else RunOrigin()
        return ReadOptions(dialect=origin.dialect, overrides=origin.overrides)


class _Verdict(Struct, frozen=True, kw_only=True):
    """What is known about a draft. `tasks` is empty if the draft has problems, and `plans` has the
    placements of each task. `refusal` is why the server would refuse the draft.
    """

    problems: Sequence[SpecProblem] = ()
    notes: Sequence[str] = ()
    tasks: Sequence[ParsedTask] = ()
    plans: Sequence[Sequence[PlacementView]] | None = None  # None if the server was not asked
    price: str = ""  # to which the user must first agree
    refusal: str = ""
    hint: str = ""
    listed: Sequence[OfferView] = ()  # list prices, if nothing can run the task


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """An editor with an example or, with `from=PROJECT/ID`, with the task of a job; with
    `file=ADDRESS`, with a file of a public repository. Raises ApiError `job-not-found`.
    """
    asked = request.query_params
    source = asked.get("from") or ""
    text = offers.starter(asked) if {"gpu", "providers"} & asked.keys() else _STARTER
    project = asked.get("project") or find_project(client, request)
    draft = _Draft(text=text, project=project, key=make_key())
    if source:
        draft = _of_job(client, source, draft)
    if recipe := asked.get("recipe"):
        found = {each.name: each.text for each in client.recipes(draft.project)}
        if recipe not in found:
            raise HTTPException(404, f"The project has no recipe {recipe!r}.")
        draft = replace(draft, text=found[recipe], recipe=recipe)
    if address := asked.get("file"):
        return _of_file(client, request, draft, address, now)
    return _show(client, request, draft, _check(draft, now))


def _of_file(
    client: ApiClient, request: Request, draft: _Draft, address: str, now: datetime
) -> Page:
    """The editor with the file at an address; without it, with the reason."""
    draft = replace(draft, address=address)
    try:
        draft = replace(draft, text=read_file(address).replace("\r\n", "\n"))
    except NoFile as error:
        return _show(client, request, draft, replace(_check(draft, now), refusal=f"{error}."))
    return _show(client, request, draft, _check(draft, now))


def send(client: ApiClient, request: Request, now: datetime) -> Page | str:
    """Check, plan or run what the form contains, as its button says. Raises ApiError,
    HTTPException.
    """
    form = form_of(request)
    text = form.get("text", "").replace("\r\n", "\n")
    if len(text) > _LONGEST:
        raise HTTPException(413, f"The task file has more than {_LONGEST:,} characters.")
    project = form.get("project") or find_project(client, request)
    if form.get("do") == "form":
        text = write_form(text, form)
    draft = _Draft(text=text, project=project, key=form.get("key", ""))
    if source := form.get("from", ""):
        draft = replace(_of_job(client, source, draft), text=text)
    params = {
        name.removeprefix(_PARAM): value
        for name, value in form.multi_items()
        if name.startswith(_PARAM) and value
    }
    draft = replace(draft, name=form.get("name", "").strip(), params=params, key=_renew(draft.key))
    verdict = _check(draft, now)
    action, recipe = form.get("do", "plan"), form.get("recipe", "").strip()
    draft = replace(draft, recipe=recipe)
    if action in ("share", "forget"):
        return _share(client, draft, action)
    if action == "check" or not verdict.tasks:
        return _show(client, request, draft, verdict)
    if action in ("plan", "form"):
        return _show(client, request, draft, _plan(client, request, draft, verdict))
    try:
        return _run(client, request, draft, verdict.tasks, consent=action == "agree")
    except ApiError as error:
        if error.status not in (409, 422) and error.code != "consent-needed":
            raise
        if error.code == "consent-needed":
            verdict = replace(_plan(client, request, draft, verdict), price=error.message)
        else:
            verdict = replace(verdict, refusal=error.message, hint=error.hint)
        return _show(client, request, draft, verdict)


def _share(client: ApiClient, draft: _Draft, action: str) -> str:
    """Store the text as a recipe of the project, or remove the recipe. Raises ApiError,
    HTTPException.
    """
    if not draft.recipe:
        raise HTTPException(400, "A recipe needs a name, such as train-small.")
    if action == "forget":
        client.delete_recipe(draft.project, draft.recipe)
        return f"/submit?project={quote(draft.project)}"
    client.put_recipe(draft.project, draft.recipe, draft.text)
    return f"/submit?project={quote(draft.project)}&recipe={quote(draft.recipe)}"


def list_keys() -> Mapping[str, Sequence[tuple[str, str, Sequence[str]]]]:
    """Return the keys of a task file by the path of the mapping that may have them, such as
    "resources": for each its name, its meaning and its possible values, for the editor.
    """
    found: dict[str, dict[str, tuple[str, str, Sequence[str]]]] = {}
    for path, name, help_text, values in _walk("", make_schema()):
        found.setdefault(path, {}).setdefault(name, (name, help_text, values))
    return {path: list(keys.values()) for path, keys in found.items()}


def _walk(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Sequence[str]]]:
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _walk(path, each)
    if isinstance(items := schema.get("items"), dict):
        yield from _walk(path, items)
    for name, inner in schema.get("properties", {}).items():
        yield path, name, str(inner.get("description", "")), [*_list_values(inner)]
        yield from _walk(f"{path}.{name}" if path else name, inner)


def _list_values(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (show_param(each) for each in schema.get("enum", ()))
    if schema.get("type") == "boolean":
        yield from ("true", "false")
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _list_values(each)


@cache
def _list_accelerators() -> Sequence[str]:
    """Return the names of the accelerators that the catalog knows, for completions."""
    return sorted({each.name for each in list_accelerators()})


@cache
def keys_json() -> bytes:
    """Return `list_keys` as JSON."""
    from msgspec.json import encode

    return encode(list_keys())


def _of_job(client: ApiClient, source: str, draft: _Draft) -> _Draft:
    """Return the draft with the task of an earlier job. Raises ApiError, HTTPException."""
    project, _, job_id = source.partition("/")
    job = client.job(project, job_id)
    try:
        run = read_run(job, job.id)
    except NotRepeatable as error:
        raise HTTPException(409, f"{error}. {error.hint}".strip()) from None
    return replace(
        draft,
        text=run.text,
        project=job.project,
        name=run.name,
        params=run.params,
        earlier=run,
        source=f"{job.project}/{job.id}",
    )


def _check(draft: _Draft, now: datetime) -> _Verdict:
    """Return the problems of the file, or its meaning, as `cavvy validate` does."""
    text, params = draft.text, draft.params
    try:
        found = parse_file(text, file=_FILE, params=params, now=now, options=draft.options)
        serves = len(found.tasks) == 1 and found.tasks[0].service is not None
        options = replace(draft.options, serves=serves)
        tasks = parse_tasks(text, file=_FILE, params=params, now=now, options=options)
    except SpecError as error:
        return _Verdict(problems=error.problems)
    if len(tasks) > 1 and draft.name:
        problem = _say("a name is for a file with one task", "set `name` of each task in the file")
        return _Verdict(problems=[problem], notes=found.notes)
    if problems := [each for each in (_object_to_folder(one, draft) for one in tasks) if each]:
        return _Verdict(problems=problems, notes=found.notes)
    named = [
        replace(
            each, task=replace(each.task, project=draft.project, name=draft.name or each.task.name)
        )
        for each in tasks
    ]
    return _Verdict(notes=found.notes, tasks=named)


def _object_to_folder(parsed: ParsedTask, draft: _Draft) -> SpecProblem | None:
    """Return the problem of a task that submits files of the user's machine, which a browser cannot
    send. A rerun uses the copy that the earlier job has.
    """
    workdir = parsed.task.workdir
    names_folder = workdir is not None and workdir.path is not None
    if not (names_folder or parsed.source.local) or (
        draft.earlier and draft.earlier.origin.snapshot
    ):
        return None
    lines = (parsed.options.text or "").splitlines()
    line = next((at for at, each in enumerate(lines, 1) if each.startswith("workdir")), 0)
    hint = "`cavvy run` sends it; here, name a Git repository in `workdir`"
    return _say("the console cannot send a folder of your machine", hint, line)


def _say(message: str, suggestion: str, line: int = 0) -> SpecProblem:
    column = 1 if line else 0
    return SpecProblem(file=_FILE, line=line, column=column, message=message, suggestion=suggestion)


def _plan(client: ApiClient, request: Request, draft: _Draft, verdict: _Verdict) -> _Verdict:
    """Let the server check the tasks and rank the offers for them. Raises ApiError."""
    if verdict.tasks[0].task.service is not None:
        return verdict  # the server checks services only when they start
    try:
        if len(verdict.tasks) > 1:
            ask = _make_graph(request, draft, verdict.tasks, consent=False)
            checked = client.check_graph(draft.project, ask, placements=_PLACEMENTS_EACH)
        else:
            checked = [_check_one(client, request, draft)]
    except ApiError as error:
        if error.status not in (403, 409, 422):
            raise
        listed = _list_prices(client, draft, verdict) if error.code == "no-offer" else ()
        return replace(verdict, refusal=error.message, hint=error.hint, listed=listed)
    price = "\n".join(each.consent_needed for each in checked if each.consent_needed)
    return replace(verdict, plans=[each.placements for each in checked], price=price)


def _list_prices(client: ApiClient, draft: _Draft, verdict: _Verdict) -> Sequence[OfferView]:
    """Return what the catalog lists for the first task, of all providers, so that people who
    have set none up see what the task would cost."""
    wanted = verdict.tasks[0].task.resources
    gpu = format_need(wanted.accelerators[0]) if wanted.accelerators else ""
    asked = {"gpu": gpu, "region": next(iter(wanted.regions), ""), "spot": wanted.spot}
    found = try_part(lambda: client.offers(draft.project, limit=_LISTED, **asked)).value
    return found.offers if found else ()


def _check_one(client: ApiClient, request: Request, draft: _Draft) -> SubmissionCheck:
    return client.check_submission(
        draft.text,
        project=draft.project,
        path=_FILE,
        params=draft.params,
        origin=_origin_of(draft),
        name=draft.name or None,
        user=user_of(request),
        placements=_PLACEMENTS,
    )


def _make_graph(
    request: Request, draft: _Draft, tasks: Sequence[ParsedTask], *, consent: bool
) -> GraphRequest:
    """Return the request that submits all tasks, or none. Its keys follow from the draft's key, so
    that a form that is sent twice runs its jobs once.
    """
    made = read_time(draft.key) or 0.0
    digests = [sha256(f"{draft.key} {number}".encode()).digest() for number in range(len(tasks))]
    origin = draft.earlier.origin if draft.earlier else RunOrigin()
    asks = []
    for each in tasks:
        own = replace(
            origin,
            task_text=each.text,
            dialect=each.options.dialect,
            overrides=each.options.overrides,
        )
        asks.append(
            SubmitRequest(
                text=each.text,
                path=_FILE,
                params=dict(each.params),
                origin=Raw(encode(own)),
                name=each.task.name,
                user=user_of(request),
                consent=consent,
            )
        )
    return GraphRequest(tasks=asks, keys=[make_id(made, digest) for digest in digests])


def _run(
    client: ApiClient,
    request: Request,
    draft: _Draft,
    tasks: Sequence[ParsedTask],
    *,
    consent: bool,
) -> str:
    """Submit the tasks, and return the path of a page that shows them. Raises ApiError."""
    origin, user, task = _origin_of(draft), user_of(request), tasks[0].task
    if len(tasks) > 1:
        graph = _make_graph(request, draft, tasks, consent=consent)
        first = client.submit_graph(draft.project, graph)[0]
        if all(each.task.group for each in tasks):
            group = client.job(first.project, first.id).array_id
            return path_of("groups", first.project, group or first.id)
        return f"/jobs?project={quote(draft.project)}"
    if task.service is not None:
        service = put_service(
            client,
            draft.text,
            project=draft.project,
            name=task.name,
            path=_FILE,
            params=draft.params,
            origin=origin,
            user=user,
            consent=consent,
        )
        return path_of("services", service.project, service.name)
    made = client.submit(
        draft.text,
        project=draft.project,
        path=_FILE,
        params=draft.params,
        origin=origin,
        name=draft.name or None,
        user=user,
        consent=consent,
        key=draft.key,
    )
    if made.members is not None:
        return path_of("groups", made.project, made.id)
    return path_of("jobs", made.project, made.id)


def _origin_of(draft: _Draft) -> RunOrigin:
    origin = draft.earlier.origin if draft.earlier else RunOrigin()
    return replace(origin, task_text=draft.text)


def _renew(key: str) -> str:
    """Return the key of the submission, or another one if it is too old for the server. With a key,
    a form that is sent twice runs one job.
    """
    made, fresh = read_time(key), make_key()
    newest = read_time(fresh) or 0.0
    return key if made is not None and abs(newest - made) < _KEY_S else fresh


def _list_earlier(client: ApiClient, request: Request) -> Sequence[JobListing]:
    """Return the newest jobs with different names, from which a task can start: no arrays and no
    replicas of services."""
    read = try_part(lambda: client.jobs(limit=_EARLIER_READ, arrays=True).jobs).value or []
    replicas = services_by_replica(client, request, read)
    found: dict[tuple[str, str], JobListing] = {}
    for each in read:
        if not each.members and each.id not in replicas:
            found.setdefault((each.project, each.name), each)
    return [*found.values()][:_EARLIER]


def _show(client: ApiClient, request: Request, draft: _Draft, verdict: _Verdict) -> Page:
    tasks = [each.task for each in verdict.tasks]
    duration = tasks[0].limits.duration if tasks else None
    known = {name: show_param(at) for task in tasks for name, at in task.params.items()}
    swept = {each.name for task in tasks for each in task.sweep}
    placements = [each for plan in verdict.plans or () for each in plan]
    return Page(
        f"Run {draft.name} again" if draft.earlier else "Run a task",
        "submit.html",
        {
            "draft": draft,
            "verdict": verdict,
            "form": read_form(draft.text),
            "hours": duration.total_seconds() / 3600 * tasks[0].nodes if duration else 0.0,
            "accelerators": _list_accelerators(),
            "meanings": [(task.name, describe_task(task)) for task in tasks],
            "plans": [*zip([task.name for task in tasks], verdict.plans or (), strict=False)],
            "recipes": try_part(lambda: client.recipes(draft.project)).value or [],
            "earlier_jobs": _list_earlier(client, request) if request.method == "GET" else (),
            "projects": sorted({*list_projects(client, request), draft.project}),
            "params": [
                (name, draft.params.get(name, ""), usual)
                for name, usual in (known or draft.params).items()
                if name not in swept
            ],
            "columns": {
                "time": any(each.wall_time_s for each in placements),
                "cost": any(each.cost_micros is not None for each in placements),
            },
        },
    )
