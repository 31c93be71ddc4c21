"""What Slurm's and PBS's places under test have in common: gangs in a shared folder, a stand-in
for the agent.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType

from tests.contract.stand_in import StandInPlace, pack_stand_in

from cavvy.domain.tasks import Scalar
from cavvy.providers.base import GangSpec, GangState, Provider, ProviderContext
from cavvy.providers.batch.commands import SubmissionUnsure
from cavvy.providers.batch.provider import BatchProvider
from cavvy.providers.registry import make_from


class BatchPlace(StandInPlace):
    """A batch system; `later` shifts the providers' clock."""

    pause_s = 0.05

    package: ModuleType

    def __init__(self, folder: Path, settings: dict[str, Scalar]) -> None:
        self.folder = folder
        self.later = timedelta(0)
        self.providers: list[BatchProvider] = []
        self.settings = settings

    def context(self, installation: str) -> ProviderContext:
        """What a provider of that installation is made of."""
        return ProviderContext(
            installation=installation,
            home=self.folder,
            settings={"folder": str(self.folder / "shared"), **self.settings},
            agent_archive=pack_stand_in,
            now=lambda: datetime.now(UTC) + self.later,
        )

    def provider(self, installation: str) -> BatchProvider:
        provider = make_from(self.package, self.context(installation))
        assert isinstance(provider, BatchProvider)
        self.providers.append(provider)
        return provider

    async def _settled(self) -> bool:
        for provider in self.providers:
            for gang in await provider.gangs():
                folder = self.gang_folder(gang.name)
                up = gang.nodes and all(
                    (folder / str(node.rank) / "lock").exists() for node in gang.nodes
                )
                if gang.state is not GangState.ENDED and (not up or (folder / "removing").exists()):
                    return False
        return True

    def gang_folder(self, name: str) -> Path:
        found = list(self.folder.glob(f"shared/*/gangs/{name}"))
        return found[0] if found else self.folder / "none"

    async def end(self, gang: str) -> None:
        for rank in self.gang_folder(gang).iterdir():
            if rank.is_dir() and rank.name.isdigit():
                (rank / "finish").touch()
        await self.until_ended(gang, self.providers)


async def lose_submission(provider: Provider, gang: GangSpec) -> None:
    """Launch a gang whose job the batch system accepts, and whose number it does not tell."""
    assert isinstance(provider, BatchProvider)
    submit = provider.system.commands.submit

    async def lost(options: Sequence[str], script: str) -> str:
        await submit(options, script)
        raise SubmissionUnsure("the answer was lost")

    provider.system.commands.submit = lost  # type: ignore[method-assign]
    try:
        await provider.launch(gang)
    finally:
        provider.system.commands.submit = submit  # type: ignore[method-assign]
