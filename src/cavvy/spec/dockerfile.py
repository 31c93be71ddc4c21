"""Builds a Dockerfile from a task. The Dockerfile runs the task's setup on a suitable base image,
in few and small layers.

A setup that only installs Python and Debian packages runs in a separate build stage, so that
compilers and caches do not end up in the image. A setup with further commands runs in the final
image, because these commands can write to any path.
"""

import re
import shlex
from collections.abc import Mapping

from cavvy.catalog.accelerators import Vendor, find_accelerator
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct, field

# For each vendor, the base image for building and the base image for running. Wheels of PyTorch,
# JAX and similar packages contain the CUDA libraries, so the `base` image is enough for running.
# CUDA 12.8 is the first version that supports Blackwell, and every driver for CUDA 12 can run it.
CUDA_BUILD = "docker.io/nvidia/cuda:12.8.1-devel-ubuntu24.04"
CUDA_WHEELS = "docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04"
CUDA_RUN = "docker.io/nvidia/cuda:12.8.1-runtime-ubuntu24.04"
ROCM = "docker.io/rocm/dev-ubuntu-24.04:6.4"
PYTHON = "docker.io/library/python:3.12-slim"
SETUP_FILE = ".cavvy-setup.sh"
_VENV = "/opt/venv"
_COMPILES = re.compile(
    r"nvcc|hipcc|flash[-_]attn|apex|deepspeed|setup\.py|\bmake\b|\bcmake\b|--no-binary|TORCH_CUDA"
)
_PIP = re.compile(r"(python3? -m )?pip3? (install|cache)\b|uv (pip|sync|venv|add)\b")
_PLAIN = re.compile(r"(export |set [-+]|cd |true$|:$|echo )")
_APT = re.compile(r"(sudo )?(DEBIAN_FRONTEND=\S+ )?apt(-get)?\b")


class DockerfileRecipe(Struct, frozen=True, kw_only=True):
    """A Dockerfile, and the additional files that its build context must contain. `uses` are the
    parts of the working folder that the Dockerfile copies; `uses` is None if the Dockerfile copies
    the whole folder.
    """

    text: str
    files: Mapping[str, str] = field(default_factory=dict)
    uses: tuple[str, ...] | None = ()
    notes: tuple[str, ...] = ()  # messages for the user


class _ImageSetup(Struct, frozen=True, kw_only=True):
    """The parts of a setup: the Debian packages to install, and the commands that do not install
    Debian packages. `known` is true if it is certain that the setup only installs packages.
    """

    packages: tuple[str, ...]
    commands: str
    known: bool


def make_recipe(task: TaskSpec, *, base: str = "") -> DockerfileRecipe:
    """Return the Dockerfile of an image in which the task's `setup` has run. `base`, if given,
    replaces the default base image.
    """
    setup = _take_apart(task.setup or "")
    run = base or task.image or _choose_run(task)
    uses = _uses(task)
    if task.image is not None or base or not setup.known:
        return _one_stage(task, setup, base or task.image or _choose_build(task), uses)
    return _two_stages(task, setup, _choose_build(task), run, uses)


def make_dockerfile(task: TaskSpec, *, base: str = "") -> str:
    """Return the recipe from `make_recipe` as one Dockerfile that needs no additional files. The
    Dockerfile's build context is the working folder.
    """
    recipe = make_recipe(task, base=base)
    text = recipe.text
    for name, content in recipe.files.items():
        lines = " \\\n    ".join(shlex.quote(line) for line in content.splitlines())
        text = text.replace(
            f"COPY {name} /tmp/{name}", f"RUN printf '%s\\n' \\\n    {lines} \\\n    >/tmp/{name}"
        )
    return text


def _one_stage(
    task: TaskSpec, setup: _ImageSetup, base: str, uses: tuple[str, ...] | None
) -> DockerfileRecipe:
    lines = [f"FROM {base}", "WORKDIR /work"]
    notes = []
    if task.image is None and not base.startswith(PYTHON.partition(":")[0]):
        lines.append(_apt(("python3", "python3-pip", "python3-venv", "git", "ca-certificates")))
    files = {}
    if task.setup:
        files[SETUP_FILE] = task.setup.rstrip("\n") + "\n"
        lines += _copy(uses)
        lines.append(f"COPY {SETUP_FILE} /tmp/{SETUP_FILE}")
        lines.append(
            f"RUN {_with_env(task)}$(command -v bash || command -v sh) -e /tmp/{SETUP_FILE}"
        )
        if not setup.known:
            notes.append(
                "the setup does more than install packages, so all of its files stay in the image"
            )
    return DockerfileRecipe(
        text=_join(task, lines), files=files, uses=uses if task.setup else (), notes=tuple(notes)
    )


def _two_stages(
    task: TaskSpec, setup: _ImageSetup, build: str, run: str, uses: tuple[str, ...] | None
) -> DockerfileRecipe:
    python = () if build == PYTHON else ("python3", "python3-venv")
    tools = (
        ("python3-dev", "build-essential") if python and _COMPILES.search(setup.commands) else ()
    )
    packages = (*python, *tools, "git", "ca-certificates", *setup.packages)
    lines = [f"FROM {build} AS setup", _apt(packages), f"RUN python3 -m venv {_VENV}"]
    lines += [
        f"ENV VIRTUAL_ENV={_VENV} PATH={_VENV}/bin:$PATH PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1",
        "WORKDIR /work",
    ]
    files = {}
    if setup.commands.strip():
        files[SETUP_FILE] = setup.commands.rstrip("\n") + "\n"
        if re.search(r"^uv ", setup.commands, re.MULTILINE):
            lines.append("RUN pip install uv")
        lines += [*_copy(uses), f"COPY {SETUP_FILE} /tmp/{SETUP_FILE}"]
        lines.append(f"RUN {_with_env(task)}bash -e /tmp/{SETUP_FILE}")
    lines += ["", f"FROM {run}"]
    final = (*(("python3",) if python else ()), "ca-certificates", *setup.packages)
    lines += [_apt(final), f"COPY --from=setup {_VENV} {_VENV}"]
    lines += [f"ENV VIRTUAL_ENV={_VENV} PATH={_VENV}/bin:$PATH", "WORKDIR /work"]
    return DockerfileRecipe(text=_join(task, lines), files=files, uses=uses if files else ())


def _choose_build(task: TaskSpec) -> str:
    match _vendor(task):
        case Vendor.NVIDIA:
            return CUDA_BUILD if _COMPILES.search(task.setup or "") else _choose_run(task)
        case _:
            return _choose_run(task)


def _choose_run(task: TaskSpec) -> str:
    match _vendor(task):
        case Vendor.NVIDIA:
            return CUDA_WHEELS if re.search(r"\b(pip|uv)\b", task.setup or "") else CUDA_RUN
        case Vendor.AMD:
            return ROCM
        case _:
            return PYTHON


def _vendor(task: TaskSpec) -> Vendor | None:
    """Return the vendor of the first accelerator that the task requests. If the task requests
    accelerators of any vendor, the result is NVIDIA. If the task requests no accelerator, the
    result is None.
    """
    for need in task.resources.accelerators:
        known = find_accelerator(need.name) if need.name else None
        return (
            known.accelerator.vendor
            if known
            else Vendor.AMD
            if need.name == "amd"
            else Vendor.NVIDIA
        )
    return None


def _uses(task: TaskSpec) -> tuple[str, ...] | None:
    """Return the parts of the working folder that the setup uses, or None for the whole folder."""
    if task.setup is None or task.workdir is None:
        return ()
    return task.setup_uses


def _take_apart(setup: str) -> _ImageSetup:
    packages: list[str] = []
    kept: list[str] = []
    known = True
    for line in re.sub(r"\\\n", " ", setup).splitlines():
        rest = []
        for command in (part.strip() for part in line.split("&&")):
            if _APT.match(command):
                packages += _packages(command)
            elif command and not command.startswith("#"):
                known = known and bool(_PIP.match(command) or _PLAIN.match(command))
                rest.append(command)
        if rest:
            kept.append(" && ".join(rest))
    if re.search(r"[|;<>`]|\$\(|\b(if|for|while|case)\b", "\n".join(kept)):
        known = False
    return _ImageSetup(
        packages=tuple(dict.fromkeys(packages)), commands="\n".join(kept), known=known
    )


def _packages(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError:
        return []
    if "install" not in words:
        return []
    return [word for word in words[words.index("install") + 1 :] if not word.startswith("-")]


def _apt(packages: tuple[str, ...]) -> str:
    wanted = " ".join(shlex.quote(each) for each in dict.fromkeys(packages))
    install = f"apt-get install -y --no-install-recommends {wanted}"
    return f"RUN apt-get update && {install} && rm -rf /var/lib/apt/lists/*"


def _copy(uses: tuple[str, ...] | None) -> list[str]:
    if uses is None:
        return ["COPY . ./"]
    return [f"COPY {shlex.quote(use)} ./{shlex.quote(use)}" for use in uses]


def _with_env(task: TaskSpec) -> str:
    return "".join(f"{name}={shlex.quote(value)} " for name, value in sorted(task.env.items()))


def _join(task: TaskSpec, lines: list[str]) -> str:
    head = (
        f"# Generated from the setup of {task.name or 'a task'}. The image contains neither "
        "the working folder nor `run`; each job supplies them."
    )
    return "\n".join([head, *lines]) + "\n"
