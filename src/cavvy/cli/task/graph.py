"""Submits or checks the tasks of a file with several tasks."""

import getpass
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Raw
from msgspec.json import encode

from cavvy.client import make_key
from cavvy.client.wire import GraphRequest, SubmitRequest
from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.wire import Submitted
    from cavvy.domain.jobs import RunOrigin
    from cavvy.task_files import LoadedTask


class GraphFile(Struct, frozen=True, kw_only=True):
    """The tasks of a file, and the project that their jobs belong to."""

    tasks: "Sequence[LoadedTask]"
    file: str
    params: Mapping[str, str]
    project: str

    def requests(self, origins: "Sequence[RunOrigin]", *, consent: bool) -> list[SubmitRequest]:
        from cavvy.cli.task.profiles import text_with_rates

        own = self.params.items()
        return [
            SubmitRequest(
                text=text_with_rates(each.text, each.task, each.folder),
                path=self.file,
                params={name: value for name, value in own if name in each.task.params},
                origin=Raw(encode(origin)),
                name=each.task.name,
                user=getpass.getuser(),
                consent=consent,
            )
            for each, origin in zip(self.tasks, origins, strict=True)
        ]


def submit_graph(client: "ApiClient", graph: GraphFile, *, yes: bool) -> "list[Submitted]":
    """Upload the files of all tasks, and queue the jobs of all tasks or of none. If the user must
    first agree to the costs, show the prices and ask. Raises ApiError, CommandFailure.
    """
    from cavvy.cli.task.submission import ask_consent, make_origin

    origins = [make_origin(client, graph.project, each, each.text) for each in graph.tasks]
    budgeted = all(each.task.limits.budget is not None for each in graph.tasks)
    keys = [make_key() for _ in graph.tasks]

    def ask_server(consent: bool) -> "list[Submitted]":
        asks = graph.requests(origins, consent=consent)
        return client.submit_graph(graph.project, GraphRequest(tasks=asks, keys=keys))

    return ask_consent(yes or (budgeted and not sys.stdin.isatty()), ask_server)


def check_graph(client: "ApiClient", graph: GraphFile) -> str:
    """Let the server apply the checks of a submission. Return the price to which the user must
    first agree, or "". Raises ApiError."""
    from cavvy.domain.jobs import RunOrigin

    origins = [
        RunOrigin(task_text=each.text, dialect=each.source.kind, overrides=each.overrides)
        for each in graph.tasks
    ]
    keys = [make_key() for _ in graph.tasks]
    asks = graph.requests(origins, consent=False)
    found = client.check_graph(graph.project, GraphRequest(tasks=asks, keys=keys))
    return "\n".join(each.consent_needed for each in found if each.consent_needed)
