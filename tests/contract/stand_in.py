"""A program in the agent's place, packed as the agent is."""

import io
import zipfile
from pathlib import Path

STAND_IN = Path(__file__).with_name("agent_stand_in.py")


def pack_stand_in(program: str | None = None) -> bytes:
    """An archive of that program, or of the stand-in that obeys files; the same bytes each time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py"), program or STAND_IN.read_text())
    return buffer.getvalue()
