"""Runs the work in an image with Apptainer or Singularity. Clusters usually have Apptainer or
Singularity instead of docker or podman.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress

from ..config import AgentConfig
from ..documents import WorkConfig
from ..work.cache import touch
from ..work.environment import BASE
from ..work.folder import CannotBuild
from . import engine
from .compatibility import find_image_misfit
from .devices import find_vendor
from .engine import ask, wait
from .own_login import NoIdentity, find_own_login

PROGRAMS = ("apptainer", "singularity")


def bring_sif(program: str, config: AgentConfig, work: WorkConfig, env: dict[str, str]) -> str:
    """Store the image as a file in the machine's cache and return the file's path. Nodes that share
    the cache share the file.

    Raises CannotBuild, OSError.
    """
    if work.build is not None:
        raise CannotBuild(
            "Apptainer cannot build Dockerfiles: build and push the image on a machine with podman "
            "or docker (`cavvy image build TASK.YAML --push NAME`), then set `image` to that name"
        )
    image = work.image or ""
    folder = config.cache + "/sif"
    path = f"{folder}/{hashlib.sha256(image.encode()).hexdigest()[:32]}.sif"
    if not touch(path) or engine.must_ask(config, image):
        if work.image_login:
            engine.record(config, image)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        fresh = f"{path}.{os.getpid()}"
        inner = dict(env)
        login = work.image_login
        if not login:
            with suppress(NoIdentity):
                login = find_own_login(image)
        if login:
            user, colon, password = login.partition(":")
            if not colon:
                raise CannotBuild(
                    "the secret for the image's registry must have the form USER:PASSWORD"
                )
            inner.update({f"{name}_DOCKER_USERNAME": user for name in ("APPTAINER", "SINGULARITY")})
            inner.update(
                {f"{name}_DOCKER_PASSWORD": password for name in ("APPTAINER", "SINGULARITY")}
            )
        # Apptainer's own cache is in the home folder, where other projects could change it.
        options = ["--disable-cache"] if config.own_cache else []
        if wait([program, "pull", *options, "--force", fresh, f"docker://{image}"], inner):
            raise CannotBuild(
                f"the image {image} could not be pulled; Apptainer's reason is in the log"
            )
        os.replace(fresh, path)
        if not work.image_login:
            engine.forget(config, image)
    if reason := find_image_misfit(config, *look(program, path, env)):
        raise CannotBuild(reason)
    return path


def look(program: str, path: str, env: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environment variables that the image's own scripts set, and the image's labels."""
    lines = ask([program, "inspect", "--environment", path], env)
    variables = dict(
        re.findall(
            r"^\s*export ([A-Za-z_]\w*)=\"?\$?\{?(?:\w+:-)?\"?([^\"}\n]*)", lines, re.MULTILINE
        )
    )
    try:
        labels = json.loads(ask([program, "inspect", "--json", "--labels", path], env))["data"][
            "attributes"
        ]["labels"]
    except (ValueError, KeyError, TypeError):
        labels = {}
    return variables, labels or {}


def make_argv(
    program: str,
    sif: str,
    config: AgentConfig,
    mounts: list[str],
) -> list[str]:
    """Return the start of a command line, to which the caller appends the command to run in the
    image. Environment variables are not passed as arguments: see `inner_environment`.
    """
    argv = [program, "exec", "--cleanenv", "--no-home", "--writable-tmpfs", "--pwd", config.folder]
    for mount in mounts:
        argv += ["--bind", mount]
    if config.devices != []:
        argv += {"amd": ["--rocm"], "nvidia": ["--nv"], "": ["--nv"]}.get(find_vendor(config), [])
    return [*argv, sif]


def inner_environment(outer: dict[str, str], env: dict[str, str]) -> dict[str, str]:
    """Return the environment in which to run Apptainer. The environment contains Apptainer's own
    variables, and the work's variables with a prefix; Apptainer removes the prefix inside the
    container.
    """
    given = {
        f"{name}ENV_{key}": value
        for name in ("APPTAINER", "SINGULARITY")
        for key, value in env.items()
        if key not in BASE
    }
    return {**outer, **given}
