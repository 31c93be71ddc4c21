"""Hosts reached by SSH as places for jobs: their CPUs, memory and accelerators, with agents as
processes.
"""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.ssh.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    from cavvy.providers.base import Refused

    try:
        from cavvy.providers.ssh.provider import SshProvider  # brings asyncssh, which is an extra
    except ModuleNotFoundError as error:
        if error.name != "asyncssh":
            raise
        raise Refused(
            "[providers.ssh] needs asyncssh, which is not installed: pip install 'cavvy[ssh]'"
        ) from error
    return SshProvider(MANIFEST, context)
