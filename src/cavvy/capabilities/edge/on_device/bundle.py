"""Packs the program of a device into a zip file that Python runs, and makes the script that starts
it. Only servers use this module."""

from __future__ import annotations

import io
import os
import zipfile

_HERE = os.path.dirname(os.path.abspath(__file__))
_CAVVY = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
# the folders that a device has, by the names of their packages there
_PACKAGES = {
    "agent": f"{_CAVVY}/agent",
    "edge": _HERE,
    "model_server": f"{_CAVVY}/model_server",
}
_LEFT_OUT = ("bundle.py",)
# What a device installs: the engine, and what checks signatures.
REQUIREMENTS = ("onnxruntime>=1.20,<2", "numpy>=2,<3", "tuf>=6,<8", "securesystemslib[crypto]>=1")

_SCRIPT = """\
# Enrols this device and runs its program: CAVVY_EDGE_TOKEN=TOKEN sh. Other users could read a token
# among the arguments, where older lines have it. Options are environment variables:
# CAVVY_EDGE_FOLDER, and CAVVY_EDGE_PYTHON, a Python that has the needed packages.
set -eu
token=${{CAVVY_EDGE_TOKEN:-${{1:-}}}}
unset CAVVY_EDGE_TOKEN
folder=${{HOME:-}}/.cavvy-edge
# the user of an engine could not read what is in the home of root
[ "$(id -u)" != 0 ] || [ -e "$folder" ] || folder=/var/lib/cavvy-edge
folder=${{CAVVY_EDGE_FOLDER:-$folder}}
python=${{CAVVY_EDGE_PYTHON:-$folder/venv/bin/python}}
umask 077
mkdir -p "$folder"
if [ -n "${{CAVVY_EDGE_PYTHON:-}}" ]; then
  [ -x "$python" ] || {{ echo "cavvy edge: CAVVY_EDGE_PYTHON: no program $python" >&2; exit 1; }}
elif [ ! -e "$folder/venv/complete" ]; then
  echo "cavvy edge: installing packages in $folder/venv" >&2
  python3 -m venv "$folder/venv"
  "$folder/venv/bin/pip" install -q {requirements}
  touch "$folder/venv/complete"
fi
curl -fsSk --pinnedpubkey '{key_pin}' -o "$folder/program.new" {address}/boot/v1/{bundle}
echo "{bundle}  $folder/program.new" | sha256sum -c --quiet
mv "$folder/program.new" "$folder/program.zip"
cat >"$folder/start" <<END
#!/bin/sh
PYTHONPATH="$folder/program.zip" exec "$python" -m cavvy.edge "$folder"
END
chmod 700 "$folder/start"
export PYTHONPATH="$folder/program.zip" CAVVY_EDGE_TOKEN="$token"
exec "$python" -m cavvy.edge "$folder" {address} {pin} </dev/null
"""


def pack_device() -> bytes:
    """Return a zip file with this package and those that it uses, for `python -m cavvy.edge`. Equal
    sources give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "cavvy/__init__.py", b"")
        for package, root in _PACKAGES.items():
            for inner, folders, names in os.walk(root):
                folders.sort()
                for name in sorted(names):
                    if name.endswith(".py") and name not in _LEFT_OUT:
                        path = f"{inner}/{name}"
                        with open(path, "rb") as file:
                            _add(
                                archive,
                                f"cavvy/{package}/{os.path.relpath(path, root)}",
                                file.read(),
                            )
    return buffer.getvalue()


def make_script(address: str, pins: tuple[str, str], bundle: str) -> str:
    """Return the shell script that a device runs. `pins` are the hashes of the server's certificate
    and of its key, and `bundle` is the hash of the packed program."""
    quoted = " ".join(f"'{each}'" for each in REQUIREMENTS)
    return _SCRIPT.format(
        requirements=quoted, address=address, pin=pins[0], key_pin=pins[1], bundle=bundle
    )


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.external_attr = 0o100644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, content)
