"""A query that is read without FastAPI gives a route what FastAPI would give it."""

import json
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import pytest
from fastapi import FastAPI, Path, Query, Request
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from cavvy.api.app import list_routes, make_reader
from cavvy.api.direct import QueryReader

Whole = Annotated[int, Query(ge=-3, le=1 << 40)]


async def route(
    *,
    request: Request,
    gang: Annotated[str, Query(max_length=5)],
    rank: Whole = 7,
    wait_s: Annotated[float, Query(ge=0, le=3600)] = 0,
    stream: str = "stdout",
    code: Annotated[int | None, Query(lt=10)] = None,
    all: bool = False,
) -> dict[str, Any]:
    return {
        "gang": gang,
        "rank": rank,
        "wait_s": wait_s,
        "stream": stream,
        "code": code,
        "all": all,
    }


app = FastAPI()
app.get("/")(route)
client = TestClient(app)
NAMES = st.sampled_from(["gang", "rank", "wait_s", "stream", "code", "all", "other", ""])
TEXTS = ["a", "abcdef", "0", "-1", "12", "1.5", "1e3", "nan", "inf", "true", "no", " 1", "+1", "١"]
VALUES = st.sampled_from([*TEXTS, "1_0", "null", "None", "%31", "%2B1", "", "a=b", "a;b=c", "é"])


@given(st.lists(st.tuples(NAMES, VALUES), max_size=6))
def test_what_is_read_is_what_fastapi_reads(pairs: list[tuple[str, str]]) -> None:
    query = "&".join(f"{name}={value}" for name, value in [("gang", "g"), *pairs])
    found = QueryReader(signature(route)).read(query.encode())
    if found is not None:
        answer = client.get(f"/?{query}")
        assert (answer.status_code, answer.json()) == (200, json.loads(json.dumps(found)))


@pytest.mark.parametrize("query", ["gang=g", "gang=g&rank=2&wait_s=30.5", "gang=a%20b&code=3"])
def test_usual_queries_are_read(query: str) -> None:
    found = QueryReader(signature(route)).read(query.encode())
    assert found == client.get(f"/?{query}").json()


@pytest.mark.parametrize(
    "annotation",
    [list[str], Annotated[str, Query(pattern="a")], Annotated[str, Path()], dict[str, str]],
)
def test_other_parameters_are_left_to_fastapi(annotation: object) -> None:
    parameter = Parameter("a", Parameter.KEYWORD_ONLY, annotation=annotation)
    with pytest.raises(TypeError):
        QueryReader(Signature([parameter]))


def test_the_routes_that_agents_ask_for_often_are_among_them() -> None:
    routes = [(each, make_reader(each)) for each, _ in list_routes() if "{" not in each.path]
    found = {each.path for each, reader in routes if reader is not None}
    assert {"/agent/v1/messages", "/agent/v1/orders", "/agent/v1/log"} <= found
    for _, reader in routes:
        if reader is not None:
            reader.read(b"other=1")  # makes what reads the parameters of the route
