"""The software with which functions run: packages, commands and, if wanted, a container image.

This file also runs on nodes, so it imports only the standard library.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

_UV_FILES = ("pyproject.toml", "uv.lock")


class FunctionImage(dict[str, Any]):
    """The software of functions. Each method returns a new image with one step more. Finished
    steps are cached by their content, as the setup of jobs is.

    As a key of a `Task`, it is a table: `Image(build=".")`.
    """

    _setup: tuple[str, ...] = ()
    _uses: tuple[str, ...] = ()
    _env: Mapping[str, str] = {}
    _python = ""

    @classmethod
    def python(cls, version: str = "") -> Self:
        """Return the node's own Python, which must have this version, such as "3.12"."""
        made = cls()
        made._python = version
        return made

    @classmethod
    def from_registry(cls, name: str, *, login: str | None = None) -> Self:
        """Return a container image, such as "python:3.12". `login` names the secret for it."""
        return cls(name=name) if login is None else cls(name=name, login=login)

    @classmethod
    def from_dockerfile(
        cls, path: str | os.PathLike[str] = "Dockerfile", *, build: str | os.PathLike[str] = "."
    ) -> Self:
        """Return the image that a Dockerfile describes, built in the folder `build`."""
        return cls(build=os.fspath(build), dockerfile=os.fspath(path))

    def pip_install(self, *packages: str, index_url: str | None = None) -> Self:
        """Add packages, such as "numpy>=2"."""
        for each in packages:
            if not isinstance(each, str):
                raise TypeError(f"pip_install: {each!r} is no string; pass one string per package")
        extra = [] if index_url is None else ["--index-url", index_url]
        return self._add(shlex.join(["pip", "install", "-q", *extra, *packages]))

    def pip_install_from_requirements(self, path: str | os.PathLike[str]) -> Self:
        """Add the packages of a requirements file in the app's folder."""
        file = os.fspath(path)
        return self._add(shlex.join(["pip", "install", "-q", "-r", file]), file)

    def uv_sync(self, folder: str | os.PathLike[str] = ".") -> Self:
        """Add the packages of `uv.lock` in a folder of the app's, with these versions; without the
        project itself, whose files are sent along."""
        place, made = os.fspath(folder), "/tmp/requirements-$$.txt"
        export = ["uv", "export", "-q", "--frozen", "--no-emit-project", "--directory", place]
        line = f"pip install -q uv && {shlex.join(export)} >{made} && pip install -q -r {made}"
        files = (os.path.normpath(os.path.join(place, name)) for name in _UV_FILES)
        return self._add(line, *files)

    def run_commands(self, *commands: str) -> Self:
        """Add shell commands."""
        return self._add("\n".join(commands))

    def env(self, variables: Mapping[str, str]) -> Self:
        """Add environment variables, which are stored as plain text."""
        made = self._copy()
        made._env = {**self._env, **variables}
        return made

    @contextmanager
    def imports(self) -> Iterator[None]:
        """Import packages of the image inside a `with` block at the top of the file: on this
        computer, where they may be missing, an ImportError is ignored."""
        try:
            yield
        except ImportError:
            if "CAVVY_JOB" in os.environ:
                raise

    def find_python(self) -> str:
        """Return the version of Python, such as "3.12", as far as the image says it, or ""."""
        found = re.match(
            r"(?:docker\.io/)?(?:library/)?python:(\d+\.\d+)", str(self.get("name", ""))
        )
        return self._python or (found.group(1) if found else "")

    def to_keys(self) -> dict[str, Any]:
        """Return the keys of the task: `image`, `setup` and `env`."""
        keys: dict[str, Any] = {}
        if self:
            keys["image"] = dict(self)
        lines = list(self._setup)
        if self._python:
            lines.insert(0, _check_python(self._python))
        if lines:
            keys["setup"] = {"run": "\n".join(lines)}
            if not self:  # in a container, each attempt runs the setup, and nothing is kept
                keys["setup"]["uses"] = list(self._uses)
        if self._env:
            keys["env"] = dict(self._env)
        return keys

    def _add(self, line: str, *uses: str) -> Self:
        made = self._copy()
        made._setup = (*self._setup, line)
        made._uses = (*self._uses, *uses)
        return made

    def _copy(self) -> Self:
        made = type(self)(self)
        made.__dict__.update(self.__dict__)
        return made


def _check_python(version: str) -> str:
    """Return the command that ends a setup on a node whose Python has another version."""
    wanted = shlex.quote(version)
    return (
        'python3 -c \'import sys; v = ".".join(map(str, sys.version_info[:3])); w = sys.argv[1]; '
        '(v + ".").startswith(w + ".") or sys.exit(f"this node has Python {v}, and the image of '
        "the function wants {w}: use Image.from_registry, or Image.python() for any version"
        f"\")' {wanted}"
    )
