"""Prepares the text and the working folder of a service that serves the files of a job, or a
published version of a model.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cavvy.cli.task.load import read_params, read_task
from cavvy.cli.task.submission import make_origin, upload_files
from cavvy.cli.view.failure import CommandFailure
from cavvy.client.blobs import read_snapshot, upload
from cavvy.client.model_folder import make_model_folder
from cavvy.client.reruns import show_param
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct, replace
from cavvy.spec import SpecError
from cavvy.spec.engines import ENGINES
from cavvy.spec.model_files import MODEL_FOLDER, ServedModel, find_models, write_service
from cavvy.spec.problems import listed
from cavvy.spec.tree import read_table
from cavvy.spec.workdir import FolderEntry, encode_manifest
from cavvy.task_files import CAVVY, ReadOptions, parse_file

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.model_wire import ModelView
    from cavvy.client.wire import JobDetail

_NAMED = 5  # maximum number of files that a message names
_OWN_KEYS = ("resources", "image", "setup", "env", "secrets")  # overrides that a service keeps


class ModelChoice(Struct, frozen=True, kw_only=True):
    """The user's options for the model: its source (checkpoint or outputs), its engine, and its
    path. If an option is "", its value is derived from the files.
    """

    source: str = ""
    engine: str = ""
    path: str = ""


class Deployment(Struct, frozen=True, kw_only=True):
    """A service to start, in the form that `put_service` accepts. `what` describes the model of the
    service.
    """

    text: str
    path: str
    params: Mapping[str, str]
    origin: RunOrigin
    what: str


def prepare(
    client: "ApiClient",
    job: "JobDetail",
    service: str,
    param: tuple[str, ...],
    choice: ModelChoice,
    version: "ModelView | None" = None,
) -> Deployment:
    """Return a service for the job's model, or for a version that was published from the job, on
    nodes with the requirements in the job's file. Raises CommandFailure, ApiError.
    """
    task, origin = _read_job(job)
    outputs = [] if version else _find_outputs(job, task, choice)
    _check_own(job, origin)
    params = {key: show_param(value) for key, value in task.params.items()} | read_params(param)
    folders = [] if origin.snapshot is None else [origin.snapshot]
    if outputs:
        model = _choose_output(task, choice, job.name)
    elif version:
        folders = [_add_version(client, job.project, origin.snapshot, version)]
        paths = [each.path for each in version.files]
        if not choice.engine and version.main in [each.path for each in find_models(paths)]:
            choice = replace(choice, path=choice.path or version.main)
        model = _choose(paths, choice, job.name)
    else:
        found = make_model_folder(client, job.project, job.name, folders, MODEL_FOLDER)
        folders = [found.snapshot]
        model = _choose([each.path for each in found.files], choice, job.name)
    text = write_service(origin.task_text, service, model, outputs)
    path = f"{service}.yaml"
    parts = _find_parts(text, path, params)
    if parts:
        folders.append(upload_files(client, job.project, task, parts))
        merged = make_model_folder(client, job.project, job.name, folders, None)
        folders = [merged.snapshot]
    new = RunOrigin(
        task_text=text,
        overrides=_keep_own(origin.overrides),
        snapshot=folders[0] if folders else None,
        versions=origin.versions,
    )
    what = f"{model.path or MODEL_FOLDER} with {model.engine}"
    return Deployment(text=text, path=path, params=params, origin=new, what=what)


def prepare_version(
    client: "ApiClient", version: "ModelView", file: str, param: tuple[str, ...]
) -> Deployment:
    """Return the service that a file describes, with the files of a published version in the folder
    MODEL_FOLDER of the service's working folder. Raises CommandFailure, ApiError.
    """
    params = read_params(param)
    loaded = read_task(file, params, ReadOptions(serves=True))
    origin = make_origin(client, version.project, loaded, loaded.text)
    snapshot = _add_version(client, version.project, origin.snapshot, version)
    what = f"its files, in the folder {MODEL_FOLDER},"
    origin = replace(origin, snapshot=snapshot)
    return Deployment(text=loaded.text, path=file, params=params, origin=origin, what=what)


def _add_version(
    client: "ApiClient", project: str, snapshot: str | None, version: "ModelView"
) -> str:
    """Return a snapshot with the files of another one, and with those of a version in the folder
    MODEL_FOLDER, in place of what that folder had."""
    known = [] if snapshot is None else read_snapshot(client, project, snapshot)
    entries = [
        *(each for each in known if f"{each.path}/".partition("/")[0] != MODEL_FOLDER),
        *(
            FolderEntry(path=f"{MODEL_FOLDER}/{each.path}", size=each.size, sha256=each.sha256)
            for each in version.files
        ),
    ]
    manifest = encode_manifest(sorted(entries, key=lambda each: each.path))
    name = sha256(manifest).hexdigest()
    upload(client, project, {name: manifest})
    return name


def prepare_file(
    client: "ApiClient", job: "JobDetail", file: str, param: tuple[str, ...], choice: ModelChoice
) -> Deployment:
    """Return the service that a file describes, with the job's files in the folder MODEL_FOLDER of
    the service's working folder. Raises CommandFailure, ApiError.
    """
    task, _ = _read_job(job)
    outputs = _find_outputs(job, task, choice)
    params = read_params(param)
    loaded = read_task(file, params, ReadOptions(serves=True))
    origin = make_origin(client, job.project, loaded, loaded.text)
    if outputs:
        inputs = [(each.source, each.target) for each in loaded.task.inputs]
        inputs += [(each, MODEL_FOLDER) for each in outputs]
        rows = [{"source": source, "target": target} for source, target in inputs]
        origin = replace(origin, overrides=json.dumps({"inputs": rows}))
    else:
        folders = [] if origin.snapshot is None else [origin.snapshot]
        found = make_model_folder(client, job.project, job.name, folders, MODEL_FOLDER)
        origin = replace(origin, snapshot=found.snapshot)
    what = f"the {'outputs' if outputs else 'checkpoint'}, in the folder {MODEL_FOLDER},"
    return Deployment(text=loaded.text, path=file, params=params, origin=origin, what=what)


def _read_job(job: "JobDetail") -> tuple[TaskSpec, RunOrigin]:
    task = msgspec.json.decode(job.task, type=TaskSpec)
    return task, msgspec.json.decode(job.origin, type=RunOrigin)


def _find_outputs(job: "JobDetail", task: TaskSpec, choice: ModelChoice) -> list[str]:
    """Return the locations of the job's outputs, or [] if the model is in its checkpoint."""
    found = [each.target for each in task.outputs] if choice.source != "checkpoint" else []
    if choice.source == "outputs" and not found:
        raise CommandFailure(f"job {job.name} has no outputs", "use --from checkpoint", exit_code=2)
    if found and job.phase != "done":
        hint = "wait for the job, or use --from checkpoint"
        raise CommandFailure(f"job {job.name} is {job.phase}: its outputs may be incomplete", hint)
    return found


def _check_own(job: "JobDetail", origin: RunOrigin) -> None:
    if (origin.dialect or CAVVY) != CAVVY or not origin.task_text:
        what = f"job {job.name} was not submitted from a Cavvy file"
        raise CommandFailure(what, "write the service's file, and add --service FILE", exit_code=2)


def _find_parts(text: str, path: str, params: Mapping[str, str]) -> Mapping[str, Path]:
    """Return the local files that the engine of a service needs. Raises CommandFailure."""
    try:
        found = parse_file(text, file=path, params=params, options=ReadOptions(serves=True))
    except SpecError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    return {each.inside: Path(each.source) for each in found.local}


def _choose(files: Sequence[str], choice: ModelChoice, job: str) -> ServedModel:
    """Choose the model to serve from `files`, and return the model with its engine. Raises
    CommandFailure.
    """
    models = find_models(files)
    if choice.path:
        known = [each.engine for each in models if each.path == choice.path.rstrip("/")]
        engine = choice.engine or next(iter(known), "")
        if not engine:
            raise _ask(f"no engine is known for {choice.path}", files)
        return ServedModel(engine=_check_engine(engine), path=choice.path.rstrip("/"))
    if choice.engine:
        _check_engine(choice.engine)
        models = [each for each in models if each.engine == choice.engine] or [
            ServedModel(engine=choice.engine, path="")
        ]
    if not models:
        raise _ask(f"no engine is known for the files of job {job}", files)
    if len(models) > 1:
        names = listed((each.path or "." for each in models), "and")
        raise CommandFailure(f"job {job} has several models: {names}", "add --model PATH")
    return models[0]


def _check_engine(name: str) -> str:
    if name not in ENGINES:
        raise CommandFailure(f"{name} is not an engine", f"use {listed(ENGINES)}", exit_code=2)
    return name


def _ask(message: str, files: Sequence[str]) -> CommandFailure:
    few = ", ".join(sorted(files)[:_NAMED]) + (", ..." if len(files) > _NAMED else "")
    hint = "write a service file with `run`, and add --service FILE; or add --engine and --model"
    return CommandFailure(f"{message} ({few})", hint)


def _choose_output(task: TaskSpec, choice: ModelChoice, job: str) -> ServedModel:
    """Return the model among the outputs, with its path below MODEL_FOLDER, the folder to which the
    outputs are copied.
    """
    model = _choose([each.source for each in task.outputs], choice, job)
    for each in task.outputs:
        if model.path and each.source == model.path:
            there = model.path if each.target.endswith("/") else each.target
            return replace(model, path=there.rpartition("/")[2])
    return model


def _keep_own(overrides: str) -> str:
    """Return the options of `cavvy run` that also apply to the service."""
    table = read_table(overrides) or {} if overrides else {}
    kept = {key: value for key, value in table.items() if key in _OWN_KEYS}
    return json.dumps(kept) if kept else ""
