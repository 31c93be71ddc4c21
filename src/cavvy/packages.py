"""Builds commands that install packages for the Python that runs this program. Cavvy shows these
install commands in hints for users.

The commands name the requirements of an extra instead of `cavvy[EXTRA]`, because Cavvy is not on
the package index.
"""

import shlex
import sys


def install_command(*requirements: str) -> str:
    """Return a shell command that installs packages for this Python with pip or, if pip is missing,
    with uv.
    """
    from importlib.util import find_spec

    has_pip = find_spec("pip") is not None
    start = [sys.executable, "-m", "pip", "install"]
    if not has_pip:
        start = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*start, *requirements])


def extra_command(extra: str) -> str:
    """Return a shell command that installs the requirements of an extra, such as `aws`."""
    import re
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("cavvy") or []
    except PackageNotFoundError:
        lines = []
    wanted = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    needed = [line.split(";")[0].strip() for line in lines if wanted.search(line)]
    if not needed:  # a copy of the sources, or one that is newer than the installed metadata
        return f"install the packages of `{extra}` in pyproject.toml"
    return install_command(*needed)


def update_command(version: str) -> str:
    """Return instructions for users on how to update Cavvy to `version` or newer."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        origin = json.loads(distribution("cavvy").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    if origin.get("dir_info", {}).get("editable"):  # PEP 610
        folder = url2pathname(urlsplit(origin["url"]).path)
        return f"git -C {shlex.quote(folder)} pull && {install_command('-e', folder)}"
    return f"install Cavvy {version} in the same way as the installed version"
