"""DigitalOcean: each node is one Droplet that starts the agent on boot."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.digitalocean.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported only here, so that listing the providers stays fast
    from cavvy.providers.digitalocean.cloud import DigitalOceanCloud
    from cavvy.providers.vm.account import make_provider

    return make_provider(MANIFEST, context, DigitalOceanCloud)
