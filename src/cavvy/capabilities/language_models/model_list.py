"""The list of models that a client may use, in the form of OpenAI's API."""

from urllib.parse import unquote

from cavvy.capabilities.serving.gateway.config import ServiceRoute
from cavvy.capabilities.serving.gateway.heads import RequestHead
from cavvy.capabilities.serving.gateway.own_answers import Answer, AnswerCode, OwnAnswer, write_json
from cavvy.capabilities.serving.gateway.rates import make_plain

MODELS = b"/v1/models"
MODEL = b"/v1/models/"  # and the name of a model


def answer_models(route: ServiceRoute, head: RequestHead, below: bytes) -> Answer | None:
    """Answer `/v1/models` of a single service with adapters in place of its replicas, whose answer
    states where the adapters come from. Return None for other requests.
    """
    if route.adapters is None or head.method not in (b"GET", b"HEAD"):
        return None
    path = make_plain(below).partition(b"?")[0].rstrip(b"/")
    if path != MODELS and not path.startswith(MODEL):
        return None
    rows = {name: describe_model(name, route) for name in sorted(route.models)}
    return answer_rows(path, rows, route.removed_prefix)


def describe_model(name: str, route: ServiceRoute) -> dict[str, object]:
    """Return the row of a model of a service."""
    row = {"id": name, "object": "model", "created": 0, "owned_by": "cavvy"}
    if route.adapters is None:
        return row
    # the source of an adapter may be a bucket or a private repository, so it is no `root`
    parent = route.models[0] if name in route.adapters.sources else None
    return {**row, "root": name, "parent": parent}


def answer_rows(path: bytes, rows: dict[str, dict[str, object]], root: str) -> Answer:
    """Answer a request for all models, or for the model in its path."""
    if path == MODELS:
        return write_json({"object": "list", "data": list(rows.values())})
    name = unquote(path[len(MODEL) :])
    if name in rows:
        return write_json(rows[name])
    message = f"no model {name!r} may be used; see {root}/v1/models"
    return OwnAnswer(404, AnswerCode.NO_MODEL, message)
