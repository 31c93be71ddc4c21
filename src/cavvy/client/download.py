"""Downloads the files of a snapshot."""

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.json import Decoder

from cavvy.client.errors import ApiError
from cavvy.client.paths import project_path
from cavvy.spec.workdir import FolderEntry

if TYPE_CHECKING:
    from cavvy.client.client import ApiClient

_WAIT_S = 270.0  # seconds that the server may need to send a large blob
_decode = Decoder(dict[str, list[FolderEntry]]).decode


def download_snapshot(
    client: "ApiClient", project: str, snapshot: str, below: str, folder: Path
) -> None:
    """Write the files in the folder `below` of a snapshot to `folder`, without its links. Raises
    ApiError, also `answer-unknown` if the server sends something else."""
    start = f"{below.strip('/')}/" if below.strip("/") else ""
    for each in _decode(_fetch(client, project, snapshot))["files"]:
        path = folder / each.path.removeprefix(start)
        if each.sha256 and each.path.startswith(start):
            if not path.resolve().is_relative_to(folder.resolve()):
                raise ApiError("answer-unknown", f"the snapshot has the path {each.path!r}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_fetch(client, project, each.sha256))


def _fetch(client: "ApiClient", project: str, name: str) -> bytes:
    data = client.call("GET", f"{project_path(project)}/blobs/{name}", wait_s=_WAIT_S).body
    if sha256(data).hexdigest() != name:
        raise ApiError("answer-unknown", f"the server sent other bytes as the blob {name}")
    return data
