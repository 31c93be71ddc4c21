"""The files that pods run, packed as one config map: the agent, with bytecode for this server's
Python version, and the programs in `pod/`.
"""

import base64
import hashlib
import importlib.util
import io
import marshal
import zipfile
from pathlib import Path
from typing import Any

_POD = Path(__file__).parent / "pod"
_FILES = ("init.py", "boot.sh", "tunnel.sh", "tunnel.py")
# PEP 552 flag: the .pyc contains a hash of its source, which Python does not compare
_UNCHECKED = 1


def make_bundle(archive: bytes) -> dict[str, Any]:
    """Make the config map. The config map's name contains a hash of its content."""
    texts = {name: (_POD / name).read_text(encoding="utf-8") for name in _FILES}
    content = hashlib.sha256(
        archive + "".join(texts.values()).encode() + importlib.util.MAGIC_NUMBER
    ).hexdigest()
    name = f"cavvy-agent-{content[:12]}"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "cavvy"}},
        "data": texts,
        "binaryData": {"agent.pyz": base64.b64encode(compile_archive(archive)).decode()},
        "immutable": True,
    }


def compile_archive(archive: bytes) -> bytes:
    """Return the archive with a compiled module next to each source file. Only this server's
    version of Python uses the compiled modules.
    """
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive)) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in sorted(old.namelist()):
            source = old.read(name)
            new.writestr(_entry(name), source, zipfile.ZIP_DEFLATED)
            if name.endswith(".py"):
                code = marshal.dumps(compile(source, name, "exec", dont_inherit=True))
                head = (
                    importlib.util.MAGIC_NUMBER
                    + _UNCHECKED.to_bytes(4, "little")
                    + importlib.util.source_hash(source)
                )
                new.writestr(_entry(name + "c"), head + code, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
