"""Pins the image of a task to the verified digest, if a policy requires signatures, and fills in
the image's own command.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from cavvy.agent.images.own_command import fill_in_command, names_own_command
from cavvy.api.errors import ApiProblem
from cavvy.api.images.registry import ImageRepository, RegistrySilent, parse_image
from cavvy.control.agents.transfers import ReadTargets, read_every
from cavvy.domain.policies import BoundPolicy, name_key
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.planner.objections import explain_signatures

_TOGETHER = 4  # images that are verified at the same time
_HINT = (
    "sign the image with `cosign sign --key KEY IMAGE@DIGEST`, or ask an admin of the project that "
    "has the policy; `cavvy project policy show` lists the policies"
)


class ImageVerifier:
    """Verifies images. The look-ups run in their own threads, so that slow registries delay nothing
    else. `read_targets` returns the private targets at which registries may be."""

    def __init__(self, read_targets: ReadTargets = read_every) -> None:
        self._read_targets = read_targets
        self._threads = ThreadPoolExecutor(_TOGETHER, thread_name_prefix="images")

    async def pin(
        self, task: TaskSpec, policies: Sequence[BoundPolicy], login: str | None
    ) -> TaskSpec:
        """Return the task with the image's digest and the keys that signed the image. A task is not
        changed if no policy requires signatures, or if the task has no image. `login` is the login
        at the image's registry, in the form USER:PASSWORD. Raises ApiProblem.
        """
        keys = sorted({key for each in policies for key in each.policy.signed_by})
        if not keys or task.image is None:
            return replace(task, image_signers=())
        loop, targets = asyncio.get_running_loop(), await self._read_targets()
        try:
            image, signers, keyless = await loop.run_in_executor(
                self._threads, _verify, task.image, login, keys, targets
            )
        except RegistrySilent as error:
            told = f"image: the signatures of {task.image} cannot be verified: {error}"
            raise ApiProblem("policy-refused", told) from error
        pinned = replace(task, image=image, image_signers=tuple(signers))
        if refusal := explain_signatures(policies, pinned):
            told = (
                "; this image has keyless signatures (with a certificate of Fulcio), which Cavvy "
                "does not verify: sign the image with a key"
            )
            raise ApiProblem("policy-refused", f"{refusal}{told if keyless else ''}", _HINT)
        return pinned

    async def fill_in_command(self, task: TaskSpec, login: str | None) -> TaskSpec:
        """Return the task with the command that its image names, if its `run` contains this
        command. The task is not changed if the registry does not answer: the node's container
        engine may know the image. Raises ApiProblem if the image names no command.
        """
        if task.image is None or not names_own_command(task.run):
            return task
        loop = asyncio.get_running_loop()
        try:
            config = await loop.run_in_executor(self._threads, _read_config, task.image, login)
            return replace(task, run=fill_in_command(task.run, config))
        except RegistrySilent:
            return task
        except ValueError as error:
            raise ApiProblem("invalid-task", f"image: {task.image}: {error}") from error


def _read_config(image: str, login: str | None) -> Mapping[str, object]:
    """Return the part `config` of the image's configuration. Raises RegistrySilent."""
    name = parse_image(image)
    repository = ImageRepository(name, login)
    manifest = repository.read_manifest(name.digest or name.reference)
    if manifest is not None and manifest.config is None and manifest.manifests:
        # The images of an index, one for each platform, name the same command.
        manifest = repository.read_manifest(manifest.manifests[0].digest)
    if manifest is None or manifest.config is None:
        raise RegistrySilent(f"{name.registry} has no such image")
    try:
        found = msgspec.json.decode(repository.read_blob(manifest.config.digest))
    except msgspec.MsgspecError as error:
        raise RegistrySilent(f"{name.registry} sent a configuration of an unknown form") from error
    config = found.get("config") if isinstance(found, dict) else None
    return config if isinstance(config, dict) else {}


def _verify(
    image: str, login: str | None, keys: Sequence[str], targets: str
) -> tuple[str, list[str], bool]:
    """Return the image's name with its digest, the fingerprints of the keys that signed the image,
    and whether the image has a keyless signature. Raises RegistrySilent.
    """
    from cavvy.api.images.signatures import find_signatures, list_signers

    name = parse_image(image)
    repository = ImageRepository(name, login, targets)
    digest = repository.find_digest()
    if digest is None:
        raise RegistrySilent(f"{name.registry} has no such image")
    found = find_signatures(repository, digest)
    signers = [name_key(each) for each in list_signers(found.statements, keys)]
    return name.at(digest), signers, found.keyless
