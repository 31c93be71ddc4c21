"""Starts the services that answer the requests of web endpoints."""

import getpass
import json
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cavvy.capabilities.functions.app import App
from cavvy.capabilities.functions.jobs import PROGRAMS, SPEC, find_folder, keep_file, list_runtime
from cavvy.capabilities.functions.on_node.web import PROBE
from cavvy.capabilities.functions.web import WebEndpoint
from cavvy.client.client import ApiClient
from cavvy.client.errors import ApiError
from cavvy.client.service_wire import (
    NamedService,
    end_service,
    list_named_services,
    put_service,
    service_path,
)
from cavvy.sdk.connections import Connections
from cavvy.sdk.errors import CavvyError, InvalidArgument
from cavvy.sdk.submission import SubmitOptions, prepare_task
from cavvy.sdk.task import Task
from cavvy.sdk.values import to_plain, write_text

_TAG = "cavvy-app"  # of a service, with the name of its app, and the suffix of its own name
_START_S, _LOOK_S = 30.0, 0.1
# what an image gets that may lack the server of apps of ASGI
_UVICORN = "python3 -c 'import uvicorn' 2>/dev/null || pip install -q uvicorn"
_CPUS = 0.25  # of a replica that does not say


def deploy_web(app: App, project: str | None, *, consent: bool, suffix: str = "") -> dict[str, str]:
    """Start or replace the services of an app's web endpoints, end those of endpoints that the app
    has no more, and return the URL of each. Raises CavvyError."""
    if app.web and not app.place.file:
        raise InvalidArgument(f"the app {app.name} is in no file", "write it into a file")
    connections = Connections(None, None, None)
    chosen = project or app.project or connections.default_project()
    found: dict[str, str] = {}
    try:
        with connections.use() as client:
            if not app.web and not suffix:
                end_services(client, chosen, app.name)
                return {}
            known = {each.name: each for each in list_named_services(client, chosen)}
            for each in app.web.values():
                name = f"{each.service}{suffix}"
                if name in known and known[name].tags.get(_TAG) != f"{app.name}{suffix}":
                    raise CavvyError(
                        f"{app.name}: the endpoint {each.name} would replace the service {name}",
                        f"end it with `cavvy stop {name}`, or rename the endpoint",
                    )
                task, files = make_web_task(app, each, name)
                options = SubmitOptions(project=chosen, files=files, serves=True)
                sent = prepare_task(client, task, options, None, connections.default_project)
                put_service(
                    client,
                    sent.text,
                    project=chosen,
                    name=name,
                    path=sent.path,
                    params={},
                    origin=sent.origin,
                    user=getpass.getuser(),
                    consent=consent,
                )
                found[each.name] = await_address(client, chosen, name)
            if not suffix:
                end_services(client, chosen, app.name, {each.service for each in app.web.values()})
    finally:
        connections.close()
    return found


def end_services(
    client: ApiClient, project: str, app: str, kept: Collection[str] = ()
) -> list[str]:
    """End the services of a deployed app's web endpoints, but for those `kept`, and return their
    names. Raises ApiError."""
    ended = list[str]()
    for each in _list_services(client, project):
        own = each.tags.get(_TAG) == app and each.state != "ending"
        if own and each.name not in kept:
            end_service(client, project, each.name)
            ended.append(each.name)
    return ended


def list_endpoints(client: ApiClient, project: str) -> dict[str, dict[str, str]]:
    """Return the URL of each web endpoint by its name, or the state of one without a URL, for each
    app that has some; those of `cavvy dev` belong to APP-dev. Raises ApiError."""
    found: dict[str, dict[str, str]] = {}
    for each in _list_services(client, project):
        if (app := each.tags.get(_TAG)) and each.state != "ending":
            name = each.name.removeprefix(f"{app.removesuffix('-dev')}-")
            found.setdefault(app, {})[name] = each.url or each.state
    return found


def _list_services(client: ApiClient, project: str) -> Sequence[NamedService]:
    """Return the services, of which there are none if the server cannot serve. Raises ApiError."""
    try:
        return list_named_services(client, project)
    except ApiError as error:
        if error.code == "not-found":
            return []
        raise


def end_web(app: App, project: str | None, suffix: str) -> None:
    """End these services. Raises CavvyError."""
    connections = Connections(None, None, None)
    chosen = project or app.project or connections.default_project()
    with connections.use() as client:
        for each in app.web.values():
            try:
                end_service(client, chosen, f"{each.service}{suffix}")
            except ApiError as error:
                if error.code != "service-not-found":
                    raise
    connections.close()


def make_web_task(app: App, endpoint: WebEndpoint, name: str) -> tuple[Task, dict[str, Path]]:
    """Return the task of a service, and the files to send beside the app's folder."""
    folder, file = find_folder(app)
    options = endpoint.options
    spec = {"app": app.name, "module": app.place.module, "file": file, "code": "", "functions": {}}
    files = {**list_runtime(), SPEC: keep_file(json.dumps(spec).encode(), "json")}
    image = options.choose_image(app.image)
    if endpoint.kind == "asgi" and (image or image.to_keys()):
        image = image.run_commands(_UVICORN)
    keys: dict[str, Any] = {
        **replace(options, image=image).to_keys(None),
        "name": name,
        "tags": {_TAG: f"{app.name}{name.removeprefix(endpoint.service)}"},
        "workdir": folder,
    }
    service = {
        "port": 8000,
        "replicas": {
            "min": options.min_replicas,
            "max": max(options.max_replicas or 1, options.min_replicas),
            "idle": f"{max(round(options.idle), 1)}s",
        },
        "concurrency": options.concurrency,
        "probe": {"path": PROBE},
    }
    if options.cpu is None and not options.gpu:  # most of the time, it waits for others
        keys["resources"] = {"cpu": _CPUS, **keys.get("resources", {})}
    run = shlex.join(["exec", "python3", f"{PROGRAMS}/web.py", SPEC, endpoint.name])
    task = Task(run, **keys)  # a Task is no service, so the section is added to its text
    table = {key: to_plain(value, key) for key, value in keys.items() if value is not None}
    task.text = write_text({**table, "run": run, "service": service})
    return task, files


def await_address(client: ApiClient, project: str, name: str) -> str:
    """Return the URL of a service, whose gateway may just start. Raises CavvyError."""
    until = time.monotonic() + _START_S
    while True:
        found = client.ask(service_path(project, name), NamedService)
        if found.url:
            return f"{found.url.rstrip('/')}/"
        if found.unreachable or time.monotonic() > until:
            told = found.unreachable or f"its gateway has not started within {_START_S:g} s"
            raise CavvyError(f"service {name} cannot be reached: {told}", "see `cavvy server logs`")
        time.sleep(_LOOK_S)


def say_addresses(urls: dict[str, str]) -> None:
    """Print where endpoints are."""
    for name, url in urls.items():
        sys.stdout.write(f"  {name} is at {url}\n")
    sys.stdout.flush()
