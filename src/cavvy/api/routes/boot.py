"""Routes for files that a node downloads by hash before it has a token. The files contain no
secrets, and each node checks the hash of each downloaded file.
"""

from asyncio import to_thread
from typing import Annotated

from fastapi import Path
from starlette.responses import FileResponse, Response

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import OPEN

router = RouteGroup("agent", prefix="/boot/v1")


@router.get("/{digest}", rule=OPEN, gives=True, errors=("blob-not-found",))
async def fetch(
    app_state: AppState, digest: Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
) -> Response:
    """Get a file that a starting node needs, by its hash."""
    downloads = app_state.downloads
    path = await to_thread(downloads.find, digest) if downloads is not None else None
    if path is None:
        raise ApiProblem("blob-not-found", f"this server has no file with the hash {digest}")
    return FileResponse(path, media_type="application/octet-stream")
