"""What runs or bills now, over all jobs: look, stop everything, sweep what belongs to nobody."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from remuda.api import views
from remuda.api.house import house_of
from remuda.api.openapi import document
from remuda.api.wire import read, reply
from remuda.client import wire
from remuda.store.base import NotFound

router = APIRouter(prefix="/v1", tags=["fleet"])


@router.get("/nodes", **document("Nodes that run or bill now.", answer=list[wire.NodeRow]))
async def nodes(request: Request, project: Annotated[str | None, Query(max_length=63)] = None) -> Response:
    house = house_of(request)
    holds = {(hold.gang, hold.rank): hold for hold in await house.store.holds()}
    rows = []
    for attempt in await house.store.open_attempts(project):
        try:
            job = await house.store.job(attempt.job_id)
        except NotFound:
            continue
        for node in await house.store.nodes(attempt.id):
            rows.append(views.node_row(job, attempt, node, holds.get((attempt.gang, node.rank))))
    return reply(rows)


@router.post("/down", **document("Stop all unfinished jobs and remove their nodes.", ask=wire.DownAsk, answer=wire.FoundList))
async def down(request: Request) -> Response:
    house = house_of(request)
    ask = await read(request, wire.DownAsk)
    return reply(wire.FoundList(found=await house.down(ask.project, ask.dry_run)))


@router.post(
    "/gc",
    **document(
        "Find, and unless dry remove, what runs under this installation's name and belongs to no unfinished job.",
        ask=wire.GcAsk,
        answer=wire.FoundList,
        errors=("place-refused", "place-unreachable"),
    ),
)
async def gc(request: Request) -> Response:
    house = house_of(request)
    ask = await read(request, wire.GcAsk)
    return reply(wire.FoundList(found=await house.gc(ask.dry_run)))
