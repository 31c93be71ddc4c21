"""The server itself: whether it is well, what it is, and its end."""

import os

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cavvy import __version__
from cavvy.api.house import house_of
from cavvy.api.openapi import document
from cavvy.api.wire import done, reply
from cavvy.client import API, REVISION, wire
from cavvy.client.state import host_name
from cavvy.domain.jobs import JOB_ENDS

AGENT_PROTOCOLS = (1,)

router = APIRouter(tags=["server"])


@router.get(
    "/v1/health", **document("Whether the server and its database answer.", answer=wire.Health)
)
async def health(request: Request) -> Response:
    await house_of(request).store.installation()
    return reply(wire.Health(status="ok"))


@router.get(
    "/v1/server", **document("What this server is and what it does.", answer=wire.ServerView)
)
async def server(request: Request) -> Response:
    house = house_of(request)
    counts = await house.store.count_jobs(None)
    return reply(
        wire.ServerView(
            version=__version__,
            api=API,
            revision=REVISION,
            agent_protocols=list(AGENT_PROTOCOLS),
            pid=os.getpid(),
            host=host_name(),
            home=str(house.settings.home),
            address=house.address,
            started_at=house.started_at,
            uptime_s=(house.now() - house.started_at).total_seconds(),
            idle_s=house.idle_s(),
            idle_stop_s=house.settings.whole("server.idle_stop_s"),
            unfinished=sum(count for phase, count in counts.items() if phase not in JOB_ENDS),
            database=house.database,
            outside=house.outside,
        )
    )


@router.post(
    "/v1/server/stop", **document("Stop the server; nodes and their work go on.", status=204)
)
async def stop(request: Request) -> Response:
    house_of(request).stop()
    return done()
