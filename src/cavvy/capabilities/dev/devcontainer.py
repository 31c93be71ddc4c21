"""Reads `devcontainer.json` (https://containers.dev/implementors/json_reference/) into the keys of
a Cavvy task file.

The file may contain comments and trailing commas, as editors accept them. A key that a session
cannot represent is noted or refused, as for files of other tools.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cavvy.domain.values import Struct
from cavvy.named_files import read_named
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.problems import ProblemNotes, SourceMark, nearest, shown
from cavvy.spec.translation import WAIT, KeptKey
from cavvy.spec.tree import MapNode, compose_all

_FOLDER = ".devcontainer"
_LONGEST = 1 << 18  # characters of a file; files in public repositories have a few thousand
_LAST_PORT = 65535
# A string, which is kept, or a comment; neither needs an end, so that each character is read once.
_COMMENT = re.compile(r'"(?:[^"\\]|\\.?)*"?|//[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_COMMA = re.compile(r'"(?:[^"\\]|\\.?)*"?|,(?=\s*[}\]])', re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z]+)(?::([^:}]*)(?::([^}]*))?)?\}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]*(=[A-Za-z0-9.+~:-]+)?")
_SIZE = re.compile(r"([0-9]{1,18})\s*([tgmk]b)?", re.IGNORECASE)
_UNITS = {"tb": 1 << 40, "gb": 1 << 30, "mb": 1 << 20, "kb": 1 << 10, "": 1}
_COMMANDS = ("onCreateCommand", "updateContentCommand", "postCreateCommand")
_COMPOSE = "Docker Compose is not supported; name the `image` of one service"
_REFUSED = {
    "dockerComposeFile": _COMPOSE,
    "service": _COMPOSE,
    "runServices": _COMPOSE,
    "mounts": "write a task file with `volumes`, and pass it as `cavvy dev FILE`",
    "privileged": "containers of jobs have no further rights on their node",
    "capAdd": "containers of jobs have no further rights on their node",
}
_NOTED = {
    "securityOpt": "the node's container engine decides; debuggers attach to own processes",
    "initializeCommand": "it would run on this machine, and Cavvy runs nothing there; run it first "
    "if the folder needs it",
    "postAttachCommand": "run it in the session's shell",
    "workspaceFolder": "the session starts in its own copy of the folder; `pwd` shows where",
    "workspaceMount": "the session gets a copy of the folder",
    "remoteUser": "the session runs as the user of the image's containers",
    "containerUser": "the session runs as the user of the image's containers",
    "overrideFeatureInstallOrder": "features are installed in the order of the file",
}
# keys that have no effect on a session
_SILENT = frozenset(
    (
        *("name", "$schema", "customizations", "features", "forwardPorts", "appPort", "image"),
        *("containerEnv", "remoteEnv", "build", "dockerFile", "context", "hostRequirements"),
        *("runArgs", "secrets", "portsAttributes", "otherPortsAttributes", "updateRemoteUserUID"),
        *("userEnvProbe", "overrideCommand", "shutdownAction", "init", "waitFor", "extensions"),
        *("settings", "devPort", "postStartCommand", *_COMMANDS),
    )
)
_RUN_ARGS = re.compile(r"--(gpus|shm-size|ipc|init|rm|name|hostname|label)\b")
# Debian packages of features that install only packages
_FEATURES: dict[str, tuple[str, ...]] = {
    "common-utils": ("ca-certificates", "curl", "less", "procps", "sudo", "unzip", "zip"),
    "git": ("git",),
    "git-lfs": ("git-lfs",),
    "github-cli": ("gh",),
    "sshd": (),  # the session has a tunnel
}
_PACKAGE_LISTS = ("apt-packages", "apt-get-packages")
_PUBLISHERS = ("ghcr.io/devcontainers/", "ghcr.io/devcontainers-", "ghcr.io/rocker-org/")
_ROOT = 'if [ "$(id -u)" = 0 ]; then _root=; else _root="sudo -n"; fi'


class DevContainer(Struct, frozen=True, kw_only=True):
    """A `devcontainer.json`. `task` has keys of a Cavvy task file; its `workdir` is absolute."""

    file: Path
    task: dict[str, Any]
    ports: tuple[int, ...] = ()  # ports of the session to forward
    extensions: tuple[str, ...] = ()  # identifiers of VS Code's extensions
    needs_gpu: bool = False
    kept: tuple[KeptKey, ...] = ()
    taken: tuple[str, ...] = ()  # variables of this machine whose values the task contains


def read_file(path: Path, environ: Mapping[str, str]) -> DevContainer:
    """Read the file. `environ` contains the variables that `${localEnv:NAME}` names. Raises
    SpecError with every problem, and OSError.
    """
    data = read_named(path, 4 * _LONGEST + 1)
    text = data.decode("utf-8-sig", errors="replace")
    notes = ProblemNotes(str(path), text)
    if len(text) > _LONGEST:
        notes.outside(str(path), "the file is too long", expected=f"at most {_LONGEST} characters")
        notes.check()
    plain = _COMMA.sub(_blank, _COMMENT.sub(_blank, text))
    try:
        root = json.loads(plain)
    except json.JSONDecodeError as error:
        mark = SourceMark(line=error.lineno, column=error.colno)
        notes.add(mark, f"this is not JSON: {error.msg}", expected="JSON; comments are allowed")
    except (RecursionError, ValueError) as error:
        notes.outside(str(path), f"this is not JSON: {error}")
    else:
        if isinstance(root, dict):
            return _DevcontainerReader(path, root, plain, notes, environ).read()
        notes.outside(
            str(path), "the file has no keys", expected='such as {"image": "python:3.12"}'
        )
    notes.check()
    raise AssertionError("a problem was added")


def _blank(found: re.Match[str]) -> str:
    """Replace a comment or a comma with spaces, so that all other text keeps its position."""
    return found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0])


class _DevcontainerReader:
    def __init__(
        self,
        path: Path,
        root: dict[str, Any],
        plain: str,
        notes: ProblemNotes,
        environ: Mapping[str, str],
    ) -> None:
        self._path, self._root, self._notes = path, root, notes
        self._kept, self._environ = TranslationNotes(), environ
        self._taken = set[str]()
        folder = path.resolve().parent
        while folder.name == _FOLDER or folder.parent.name == _FOLDER:
            folder = folder.parent
        self._folder = folder
        self._marks = _find_marks(plain)

    def read(self) -> DevContainer:
        for key in self._root:
            if key in _REFUSED and self._root[key] not in (False, [], {}, None):
                self._refuse(key, _REFUSED[key])
            elif key in _NOTED:
                self._note(key, _NOTED[key])
            elif key not in _SILENT and key not in _REFUSED:
                close = nearest(key, {*_SILENT, *_NOTED, *_REFUSED})
                hint = f"did you mean `{close}`?" if close else "delete the key"
                self._wrong(key, f"unknown key {shown(key)}", suggestion=hint)
        env = self._read_env()
        task: dict[str, Any] = {"workdir": str(self._folder), "session": True}
        task |= {"image": image} if (image := self._read_image()) else {}
        task |= {"env": env} if env else {}
        setup = [*self._read_features(), *self._read_commands(*_COMMANDS)]
        task |= {"setup": "\n".join(setup) + "\n"} if setup else {}
        started = self._read_commands("postStartCommand")
        task["run"] = "\n".join([*started, WAIT])
        needs, needs_gpu = self._read_requirements()
        task |= {"resources": needs} if needs else {}
        self._read_run_args()
        for name in self._read_table("secrets"):
            self._note("secrets", f"`cavvy secret set {name}` stores it; pass `--secret {name}`")
        ports, extensions = self._read_ports(), self._read_extensions()
        self._notes.check()
        return DevContainer(
            file=self._path,
            task=task,
            ports=ports,
            extensions=extensions,
            needs_gpu=needs_gpu,
            kept=self._kept.list_kept(),
            taken=tuple(sorted(self._taken)),
        )

    # Values

    def _read_image(self) -> str | dict[str, Any] | None:
        build = self._read_table("build")
        old = self._read_text("dockerFile")
        if old is not None:
            build = {"dockerfile": old, "context": self._read_text("context") or ".", **build}
        image = self._read_text("image")
        if image is not None and build:
            self._wrong("build", "`image` and `build` are both given", suggestion="delete one")
            return None
        if image is not None:
            return self._fill("image", image)
        if not build:
            if "dockerComposeFile" not in self._root:
                hint = 'such as "image": "mcr.microsoft.com/devcontainers/python:3.12"'
                self._notes.outside(str(self._path), "`image` or `build` is missing", expected=hint)
            return None
        return self._read_build(build)

    def _read_build(self, build: dict[str, Any]) -> dict[str, Any] | None:
        dockerfile = build.get("dockerfile")
        context, target, args = (
            build.get("context", "."),
            build.get("target"),
            build.get("args", {}),
        )
        texts = (dockerfile, context, *([target] if target is not None else []))
        if not all(isinstance(each, str) and each for each in texts) or not _is_texts(args):
            expected = '{"dockerfile": "Dockerfile", "context": "..", "args": {"NAME": "value"}}'
            self._wrong("build", "the value cannot be read", expected=expected)
            return None
        for key in build.keys() - {"dockerfile", "context", "target", "args", "cacheFrom"}:
            self._refuse("build", f"`{key}` cannot be passed to the build")
        own = os.path.dirname(os.path.abspath(self._path))
        inside = os.path.relpath(os.path.normpath(os.path.join(own, context)), self._folder)
        whole = os.path.normpath(os.path.join(own, str(dockerfile)))
        file = os.path.relpath(whole, os.path.join(self._folder, inside))
        if inside.startswith("..") or file.startswith(".."):
            reason = f"the context must be inside of {self._folder}, and contain the Dockerfile"
            self._wrong("build", "the image cannot be built from these paths", expected=reason)
            return None
        made: dict[str, Any] = {"build": inside, "dockerfile": file}
        made |= {"target": target} if target else {}
        filled = {name: self._fill("build", value) for name, value in args.items()}
        return made | ({"args": filled} if filled else {})

    def _read_env(self) -> dict[str, str]:
        env: dict[str, str] = {}
        for key in ("containerEnv", "remoteEnv"):
            for name, value in self._read_table(key).items():
                if value is None and key == "remoteEnv":
                    self._note(key, f"{name} cannot be unset")
                elif not isinstance(value, str) or not _ENV_NAME.fullmatch(name):
                    self._wrong(key, f"{shown(name)} has no name or value of a variable")
                else:
                    env[name] = self._fill(key, value, env)
        return env

    def _read_features(self) -> Iterator[str]:
        packages: list[str] = []
        for name, options in self._read_table("features").items():
            plain = name.rpartition("@")[0] or name
            short = plain.rpartition("/")[2].partition(":")[0]
            if not name.startswith(_PUBLISHERS) or short not in {*_FEATURES, *_PACKAGE_LISTS}:
                self._refuse(
                    "features",
                    f"{shown(name, 80)}: Cavvy runs no install scripts of features; use an image "
                    "that contains it, or install it in `postCreateCommand`",
                )
                continue
            packages += _FEATURES.get(short, ())
            if short not in _PACKAGE_LISTS:
                chosen = options if isinstance(options, dict) else {}
                for option in sorted(chosen.keys() - {"version"}):
                    self._note("features", f"{short}: the option {shown(option)} has no effect")
                continue
            listed = str(options.get("packages", "")) if isinstance(options, dict) else ""
            for package in filter(None, map(str.strip, listed.split(","))):
                if _PACKAGE.fullmatch(package):
                    packages.append(package)
                else:
                    self._wrong("features", f"{shown(package)} is not the name of a package")
        if packages:
            words = " ".join(dict.fromkeys(packages))
            yield _ROOT
            yield "$_root apt-get update -qq"
            install = "DEBIAN_FRONTEND=noninteractive apt-get install -yqq --no-install-recommends"
            yield f"$_root env {install} {words}"

    def _read_commands(self, *keys: str) -> list[str]:
        """Return shell lines for the commands of these keys: a text is for the shell, a list is a
        program with its arguments, and a table has several of them, which run one after another.
        """
        found: list[str] = []
        for key in keys:
            value = self._root.get(key)
            several = value.values() if isinstance(value, dict) else [value]
            for each in several:
                if isinstance(each, str):
                    found += [self._fill(key, each)] if each.strip() else []
                elif isinstance(each, list) and all(isinstance(word, str) for word in each):
                    found += [shlex.join(self._fill(key, word) for word in each)] if each else []
                elif each is not None:
                    expected = "a text, a list of words, or a table of these"
                    self._wrong(key, "the command cannot be read", expected=expected)
        return found

    def _read_requirements(self) -> tuple[dict[str, Any], bool]:
        """Return the resources, and whether a GPU is needed."""
        table, needs = self._read_table("hostRequirements"), dict[str, Any]()
        cpus = table.get("cpus")
        if isinstance(cpus, int) and not isinstance(cpus, bool) and cpus > 0:
            needs["cpu"] = cpus
        elif cpus is not None:
            self._wrong("hostRequirements", "`cpus` must be a whole number above 0")
        for key, own in (("memory", "memory"), ("storage", "disk")):
            if (value := table.get(key)) is None:
                continue
            found = _SIZE.fullmatch(str(value).strip())
            if found is None or not int(found[1]):
                self._wrong("hostRequirements", f"`{key}` is no size", expected='such as "8gb"')
            else:
                size = int(found[1]) * _UNITS[(found[2] or "").lower()]
                needs[own] = f"{max(1, -(-size // (1 << 30)))}GB"
        gpu = table.get("gpu")
        if gpu == "optional":
            self._note("hostRequirements", "`--gpu NAME` requests a GPU")
        return needs, gpu not in (None, False, "optional")

    def _read_run_args(self) -> None:
        words = self._root.get("runArgs") or []
        if not isinstance(words, list):
            self._wrong("runArgs", "the value must be a list of words")
            return
        unfit = [
            each
            for each in map(str, words)
            if each.startswith("-") and _RUN_ARGS.match(each) is None
        ]
        if unfit:
            self._refuse("runArgs", f"{shown(unfit[0])} cannot be passed to the container engine")
        elif words:
            self._note("runArgs", "containers get their node's GPUs and shared memory anyway")

    def _read_ports(self) -> tuple[int, ...]:
        found: list[int] = []
        for key in ("forwardPorts", "appPort"):
            value = self._root.get(key)
            for each in value if isinstance(value, list) else [value] if value is not None else []:
                host, _, port = str(each).rpartition(":")
                if key == "forwardPorts" and host not in ("", "localhost", "127.0.0.1"):
                    self._refuse(key, f"{shown(str(each))}: only the session's own ports")
                elif isinstance(each, bool) or not _is_port(port):
                    self._wrong(key, f"{shown(str(each))} is no port", expected="1 to 65535")
                else:
                    found.append(int(port))
        return tuple(dict.fromkeys(found))

    def _read_extensions(self) -> tuple[str, ...]:
        vscode = self._read_table("customizations").get("vscode")
        listed = vscode.get("extensions") if isinstance(vscode, dict) else None
        listed = listed or self._root.get("extensions")
        names = listed if isinstance(listed, list) else []
        found = [each for each in names if isinstance(each, str)]
        others = sorted(self._read_table("customizations").keys() - {"vscode"})
        if others:
            self._note("customizations", f"Cavvy does not read those of {', '.join(others)[:200]}")
        return tuple(each for each in found if re.fullmatch(r"[\w.-]+(@[\w.-]+)?", each))

    # Helpers

    def _read_table(self, key: str) -> dict[str, Any]:
        value = self._root.get(key)
        if isinstance(value, dict) or value is None:
            return value or {}
        self._wrong(key, f"`{key}` must be a table")
        return {}

    def _read_text(self, key: str) -> str | None:
        value = self._root.get(key)
        if value is None or (isinstance(value, str) and value.strip()):
            return value
        self._wrong(key, f"`{key}` must be a text")
        return None

    def _fill(self, key: str, text: str, env: Mapping[str, str] | None = None) -> str:
        """Replace the variables of the file. A shell's own `${NAME}` stays."""
        name = self._folder.name
        values = {
            "localWorkspaceFolder": str(self._folder),
            "localWorkspaceFolderBasename": name,
            "containerWorkspaceFolderBasename": name,
            "containerWorkspaceFolder": ".",
        }

        def find(found: re.Match[str]) -> str:
            kind, variable, default = found[1], found[2], found[3]
            if variable is None:
                return values.get(kind, found[0])
            if kind in ("localEnv", "env"):
                if variable in self._environ:
                    self._taken.add(variable)
                    self._note(key, f"contains the value of this machine's variable {variable}")
                return self._environ.get(variable, default or "")
            if kind != "containerEnv":
                return found[0]
            if env is not None and variable in env:
                return env[variable]
            if env is None:
                return "${" + variable + (f":-{default}" if default else "") + "}"
            reason = f"{found[0]} is known only on the node; set it in `postStartCommand`"
            self._refuse(key, reason)
            return ""

        return _VARIABLE.sub(find, text)

    def _mark(self, key: str) -> SourceMark:
        return self._marks.get(key, SourceMark(line=1, column=1))

    def _note(self, key: str, reason: str) -> None:
        self._kept.note(self._mark(key), key, reason)

    def _refuse(self, key: str, reason: str) -> None:
        self._wrong(key, f"`{key}` is not supported: {reason}")

    def _wrong(self, key: str, message: str, *, expected: str = "", suggestion: str = "") -> None:
        self._notes.add(self._mark(key), message, expected=expected, suggestion=suggestion)


def _find_marks(plain: str) -> dict[str, SourceMark]:
    """Return the positions of the file's keys, if the text is also YAML, as most JSON is."""
    documents = compose_all(plain.replace("\t", " "), ProblemNotes("", plain))
    if len(documents) != 1 or not isinstance(documents[0], MapNode):
        return {}
    return {key.text: key.mark for key, _ in documents[0].entries}


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) <= _LAST_PORT
