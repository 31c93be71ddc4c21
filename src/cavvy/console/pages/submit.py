"""The editor of a task file: shows its problems by line, ranks the offers for it, and runs it."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.client import ApiClient, ApiError, make_key
from cavvy.client.paths import read_time
from cavvy.client.reruns import EarlierRun, NotRepeatable, read_run, show_value
from cavvy.client.service_wire import put_service
from cavvy.client.wire import PlacementView
from cavvy.console.pages import offers
from cavvy.console.pages.page import Page, form_of, list_projects, path_of, try_part, user_of
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.tasks import TaskSpec
from cavvy.spec import SpecError
from cavvy.spec.describe import describe_task
from cavvy.spec.problems import SpecProblem
from cavvy.spec.schema import make_schema
from cavvy.task_files import ReadOptions, Translation, parse_file, parse_task

_FILE = "task.yaml"  # the name of the file in messages
_LONGEST = 256 << 10  # characters of a task file
_PLACEMENTS = 12
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
    key: str = ""

    @property
    def options(self) -> ReadOptions:
        origin = self.earlier.origin if self.earlier else RunOrigin()
        return ReadOptions(dialect=origin.dialect, overrides=origin.overrides)


class _Verdict(Struct, frozen=True, kw_only=True):
    """What is known about a draft. `refusal` is why the server would refuse it."""

    problems: Sequence[SpecProblem] = ()
    found: Translation | None = None
    task: TaskSpec | None = None
    placements: Sequence[PlacementView] | None = None  # None if the server was not asked
    price: str = ""  # to which the user must first agree
    refusal: str = ""
    hint: str = ""

    @property
    def serves(self) -> bool:
        return self.task is not None and self.task.service is not None


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """An editor with an example or, with `from=PROJECT/ID`, with the task of a job. Raises ApiError
    `job-not-found`.
    """
    asked = request.query_params
    source = asked.get("from") or ""
    text = offers.starter(asked) if {"gpu", "providers"} & asked.keys() else _STARTER
    draft = _Draft(text=text, project=asked.get("project") or "default", key=make_key())
    if source:
        draft = _of_job(client, source, draft)
    if recipe := asked.get("recipe"):
        found = {each.name: each.text for each in client.recipes(draft.project)}
        if recipe not in found:
            raise HTTPException(404, f"The project has no recipe {recipe!r}.")
        draft = replace(draft, text=found[recipe], recipe=recipe)
    return _show(client, request, draft, _check(draft, now))


def send(client: ApiClient, request: Request, now: datetime) -> Page | str:
    """Check, plan or run what the form contains, as its button says. Raises ApiError,
    HTTPException.
    """
    form = form_of(request)
    text = form.get("text", "").replace("\r\n", "\n")
    if len(text) > _LONGEST:
        raise HTTPException(413, f"The task file has more than {_LONGEST:,} characters.")
    draft = _Draft(text=text, project=form.get("project") or "default", key=form.get("key", ""))
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
    if action == "check" or verdict.task is None:
        return _show(client, request, draft, verdict)
    if action == "plan":
        return _show(client, request, draft, _plan(client, request, draft, verdict))
    try:
        return _run(client, request, draft, verdict.task, consent=action == "agree")
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
    yield from (show_value(each) for each in schema.get("enum", ()))
    if schema.get("type") == "boolean":
        yield from ("true", "false")
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _list_values(each)


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
        serves = any(each.service is not None for each in found.tasks)
        options = replace(draft.options, serves=serves)
        task = parse_task(text, file=_FILE, params=params, now=now, options=options)
    except SpecError as error:
        return _Verdict(problems=error.problems)
    if problem := _object_to_folder(task, found, draft):
        return _Verdict(problems=[problem], found=found)
    task = replace(task, project=draft.project, name=draft.name or task.name)
    return _Verdict(found=found, task=task)


def _object_to_folder(task: TaskSpec, found: Translation, draft: _Draft) -> SpecProblem | None:
    """Return the problem of a task that submits files of the user's machine, which a browser cannot
    send. A rerun uses the copy that the earlier job has.
    """
    names_folder = task.workdir is not None and task.workdir.path is not None
    if not (names_folder or found.local) or (draft.earlier and draft.earlier.origin.snapshot):
        return None
    lines = draft.text.splitlines()
    line = next((at for at, each in enumerate(lines, 1) if each.startswith("workdir")), 0)
    return SpecProblem(
        file=_FILE,
        line=line,
        column=1 if line else 0,
        message="the console cannot send a folder of your machine",
        suggestion="`cavvy run` sends it; here, name a Git repository in `workdir`",
    )


def _plan(client: ApiClient, request: Request, draft: _Draft, verdict: _Verdict) -> _Verdict:
    """Let the server check the task and rank the offers for it. Raises ApiError."""
    if verdict.serves:  # the server checks services only when they start
        return verdict
    try:
        checked = client.check_submission(
            draft.text,
            project=draft.project,
            path=_FILE,
            params=draft.params,
            origin=_origin_of(draft),
            name=draft.name or None,
            user=user_of(request),
            placements=_PLACEMENTS,
        )
    except ApiError as error:
        if error.status not in (403, 409, 422):
            raise
        return replace(verdict, refusal=error.message, hint=error.hint)
    return replace(verdict, placements=checked.placements, price=checked.consent_needed)


def _run(
    client: ApiClient, request: Request, draft: _Draft, task: TaskSpec, *, consent: bool
) -> str:
    """Submit the task, and return the path of its page. Raises ApiError."""
    origin, user = _origin_of(draft), user_of(request)
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
        return f"/jobs?project={made.project}&text={made.name}"
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


def _show(client: ApiClient, request: Request, draft: _Draft, verdict: _Verdict) -> Page:
    task = verdict.task
    known = {} if task is None else {name: show_value(at) for name, at in task.params.items()}
    swept = {each.name for each in task.sweep} if task else set()
    return Page(
        f"Run {draft.name} again" if draft.earlier else "Run a task",
        "submit.html",
        {
            "draft": draft,
            "verdict": verdict,
            "meaning": describe_task(task) if task else [],
            "recipes": try_part(lambda: client.recipes(draft.project)).value or [],
            "projects": sorted({*list_projects(client, request), draft.project}),
            "params": [
                (name, draft.params.get(name, ""), usual)
                for name, usual in (known or draft.params).items()
                if name not in swept
            ],
            "columns": {
                "time": any(each.wall_time_s for each in verdict.placements or ()),
                "cost": any(each.cost_micros is not None for each in verdict.placements or ()),
            },
        },
    )
