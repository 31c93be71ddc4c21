"""Prepares the work's image in a container engine: logs in, pulls or builds the image, and inspects
it.

Records which images this machine pulled with the login of a task, and which images each project
has brought here. If the machine separates projects, a task gets an image of the first kind only if
the registry permits the task's own login. On a host where each project has its own cache, the work
of another project may have replaced an image that the task's project has not brought.

The record of an image is an empty file for its name and one for its ID, because engines also find
an image by its ID. The record of the name is written before the pull, so an image is never present
without a record.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal

from ..allowed_folders import AllowedFolders, LeadsOutside
from ..config import AgentConfig
from ..disk import open_private, read_text, write_whole
from ..documents import WorkConfig
from ..work.folder import CannotBuild, build_folder, inside
from ..work.reaper import exit_code
from ..work.trees import remove_tree
from .compatibility import find_image_misfit
from .own_login import NoIdentity, find_own_login

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..work.reaper import ChildCommand

    FindLogin = Callable[[str], str | None]


HUB = "https://index.docker.io/v1/"  # the key under which engines store Docker Hub's login


def bring_image(
    engine: str,
    config: AgentConfig,
    work: WorkConfig,
    command: ChildCommand,
    variables: dict[str, str],
) -> None:
    """Pull or build the work's image, and check that this node can run it. `variables` are those of
    the work; the engine gets only the environment of `command`. Raises CannotBuild, OSError.
    """
    image, env = work.image or "", command.env
    known = find_id(engine, image, env)
    own = known and is_own(config, image, known)
    if work.build is not None:
        if not own or must_ask(config):
            build(engine, config, work, command, variables)
    elif not own or must_ask(config, image, known):
        _pull_if_possible(engine, config, work, env, known)
    note_own(config, image, find_id(engine, image, env))
    if reason := find_image_misfit(config, *look(engine, image, env)):
        raise CannotBuild(reason)


def _pull_if_possible(
    engine: str, config: AgentConfig, work: WorkConfig, env: dict[str, str], known: str
) -> None:
    """Pull the image. If this fails, use the machine's copy `known`, such as an image that an
    administrator placed there, unless a task's login is needed. Raises CannotBuild."""
    image = work.image or ""
    try:
        pull(engine, config, work, env)
    except CannotBuild:
        if not known or must_ask(config, image, known):
            raise
        text = f"cavvy: {image} cannot be pulled, so this node's copy is used without a check\n"
        os.write(2, text.encode("utf-8", "backslashreplace"))


def pull(
    engine: str,
    config: AgentConfig,
    work: WorkConfig,
    env: dict[str, str],
    find_login: FindLogin = find_own_login,
) -> None:
    """Pull the work's image with the login that the task names. If the task names no login, try the
    node's own identity at a cloud's registry, then try without a login. Raises CannotBuild.
    """
    image, known = work.image or "", ""
    if work.image_login:
        record(config, image)
        known = " with the login that the task names"
        code = pull_as(work.image_login, engine, config, image, env)
    else:
        own, why_not = None, ""
        try:
            own = find_login(image)
        except NoIdentity as error:
            why_not = f" without a login, and the node has no identity for this registry ({error})"
        # the node's identity may have no rights to a public image, which needs none
        code = pull_as(own, engine, config, image, env) if own else 1
        if code:
            code = wait([engine, "pull", image], env)
            known = why_not or (" with the node's own identity, or without a login" if own else "")
    if code:
        raise CannotBuild(
            f"the image {image} could not be pulled{known}; the engine's reason is in the log"
        )
    note = record if work.image_login else forget
    note(config, *filter(None, (image, find_id(engine, image, env))))


def pull_as(login: str, engine: str, config: AgentConfig, image: str, env: dict[str, str]) -> int:
    """Pull an image with the login USER:PASSWORD; return the engine's exit code."""
    folder = config.private + "/login"
    try:
        write_login(folder, image, login)
        argv = (
            [engine, "pull", "--authfile", folder + "/config.json", image]
            if engine.endswith("podman")
            else [engine, "--config", folder, "pull", image]
        )
        return wait(argv, env)
    finally:
        remove_tree(folder)


def write_login(folder: str, image: str, login: str) -> None:
    """Write an engine configuration with the login for one registry. Only this user can read the
    file. Raises CannotBuild, OSError.
    """
    user, colon, password = login.partition(":")
    if not colon or not user or not password:
        raise CannotBuild("the secret for the image's registry must have the form USER:PASSWORD")
    first = image.partition("/")[0]
    registry = (
        first if "/" in image and ("." in first or ":" in first or first == "localhost") else HUB
    )
    names = (
        [registry] if registry != HUB else [HUB, "docker.io"]
    )  # docker and podman use different names for Docker Hub
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    auths = {name: {"auth": auth} for name in names}
    write_whole(folder + "/config.json", json.dumps({"auths": auths}))


def build(
    engine: str,
    config: AgentConfig,
    work: WorkConfig,
    command: ChildCommand,
    variables: dict[str, str],
) -> None:
    """Build an image from the user's Dockerfile in a new copy of the frozen working folder, without
    inputs."""
    assert work.build is not None
    os.write(command.channel, b"setup\n")
    context = config.home + "/context"
    try:
        build_folder(config, work, context, variables)
        folder = context if work.build.path in (".", "") else inside(context, work.build.path)
        dockerfile = inside(folder, work.build.dockerfile)
        try:
            AllowedFolders([context]).stat(dockerfile)
        except FileNotFoundError as error:
            raise CannotBuild(
                f"the build folder {work.build.path} of the working folder has no "
                f"{work.build.dockerfile}"
            ) from error
        except LeadsOutside as error:
            raise CannotBuild(f"{work.build.dockerfile}: {error}") from error
        argv = ["build", "--tag", work.image or "", "--file", dockerfile]
        # the build has no login, so it must not start from an image that another project pulled
        argv += ["--pull"] if must_ask(config) else []
        if config.own_cache and "podman" in engine and "--pull" not in argv:
            argv.append("--pull=newer")  # another project may have replaced the base image
        argv += ["--target", work.build.target] if work.build.target else []
        for name, value in sorted(work.build.args.items()):
            argv += ["--build-arg", f"{name}={value}"]
        code = 1
        for extra in build_ways(engine):
            code = wait([engine, *argv, *extra, folder], command.env)
            if not code:
                break
        if code:
            raise CannotBuild(
                f"the image could not be built from {work.build.dockerfile}; see the log for the "
                "reason"
            )
    finally:
        remove_tree(context)


def build_ways(engine: str) -> list[list[str]]:
    """Return the options of each build attempt, in the order of the attempts. Podman's second
    attempt uses chroot, which needs no container runtime.
    """
    return (
        [["--network", "host"], ["--network", "host", "--isolation", "chroot"]]
        if "podman" in engine
        else [[]]
    )


def look(engine: str, image: str, env: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the image's environment variables and labels."""
    found = find_config(engine, image, env)
    pairs = [each.split("=", 1) for each in found.get("Env") or [] if "=" in each]
    return {pair[0]: pair[1] for pair in pairs}, found.get("Labels") or {}


def find_config(engine: str, image: str, env: dict[str, str]) -> dict[str, Any]:
    """Return the part `config` of the image's configuration, or an empty table."""
    text = ask([engine, "image", "inspect", "--format", "{{json .Config}}", image], env)
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def find_id(engine: str, image: str, env: dict[str, str]) -> str:
    """Return the image's ID, or "" if this machine does not have the image."""
    argv = [engine, "image", "inspect", "--format", "{{.Id}}", image]
    return ask(argv, env, discard_errors=True)


def ask(argv: list[str], env: dict[str, str], *, discard_errors: bool = False) -> str:
    """Run a program and return its output, or "" if it fails. The program's messages are written to
    the task's log, or discarded.
    """
    reader, writer = os.pipe()
    actions: list[tuple[int, int, int] | tuple[int, int, str, int, int]]
    actions = [(os.POSIX_SPAWN_DUP2, writer, 1)]
    if discard_errors:
        actions.append((os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0))
    pid = os.posix_spawn(argv[0], argv, env, file_actions=actions, setsigdef=[signal.SIGTERM])
    os.close(writer)
    with open(reader, encoding="utf-8", errors="replace") as file:
        text = file.read().strip()
    return "" if exit_code(os.waitpid(pid, 0)[1]) else text


def wait(argv: list[str], env: dict[str, str]) -> int:
    """Run a program and write its output to the task's log; return its exit code."""
    pid = os.posix_spawn(argv[0], argv, env, setsigdef=[signal.SIGTERM])
    return exit_code(os.waitpid(pid, 0)[1])


def quiet(argv: list[str], env: dict[str, str]) -> int:
    """Run a program and discard its output; return its exit code."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
        pid = os.posix_spawn(argv[0], argv, env, file_actions=actions, setsigdef=[signal.SIGTERM])
    finally:
        os.close(null)
    return exit_code(os.waitpid(pid, 0)[1])


def record(config: AgentConfig, *names: str) -> None:
    """Record that an image with these names was pulled with a login. Raises OSError."""
    os.makedirs(_folder(config), mode=0o700, exist_ok=True)
    for name in names:
        os.close(open_private(_path(config, name)))


def forget(config: AgentConfig, *names: str) -> None:
    """Delete the records of an image that was pulled without the login of a task."""
    for name in names:
        if os.path.exists(_path(config, name)):
            os.unlink(_path(config, name))


def must_ask(config: AgentConfig, *names: str) -> bool:
    """Return whether the registry must permit the task to use the image with these names, although
    the machine has the image. Without names, return whether this applies to any image.
    """
    paths = [_path(config, name) for name in names] or [_folder(config)]
    return config.separates and any(map(os.path.exists, paths))


def is_own(config: AgentConfig, image: str, found: str) -> bool:
    """Return whether the work of this project has brought the image with the ID `found`, or all
    work shares images."""
    return not config.own_cache or read_text(_own(config, image)) == found


def note_own(config: AgentConfig, image: str, found: str) -> None:
    """Record that this project has brought the image with the ID `found`. Raises OSError."""
    if config.own_cache:
        os.makedirs(config.cache + "/images", mode=0o700, exist_ok=True)
        write_whole(_own(config, image), found)


def _own(config: AgentConfig, image: str) -> str:
    return f"{config.cache}/images/{hashlib.sha256(image.encode()).hexdigest()[:32]}"


def _folder(config: AgentConfig) -> str:
    return config.caches + "/private_images"  # all projects share the engine's images


def _path(config: AgentConfig, name: str) -> str:
    return f"{_folder(config)}/{hashlib.sha256(name.encode()).hexdigest()[:32]}"
