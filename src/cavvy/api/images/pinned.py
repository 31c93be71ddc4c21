"""Pins the image of a task to the verified digest, if a policy requires signatures."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from cavvy.api.errors import ApiProblem
from cavvy.api.images.registry import ImageRepository, RegistrySilent, parse_image
from cavvy.control.agents.transfers import ReadTargets, read_every
from cavvy.domain.policies import BoundPolicy, name_key
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.planner.policies import explain_signatures

_TOGETHER = 4  # images that are verified at the same time
_HINT = (
    "sign the image with `cosign sign --key KEY IMAGE@DIGEST`, or ask an admin of the project that "
    "has the policy; `cavvy policy show` lists the policies"
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
