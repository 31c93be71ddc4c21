"""DigitalOcean: each node is one Droplet that starts the agent on boot."""

from cavvy.providers.base import Provider, ProviderContext
from cavvy.providers.digitalocean.manifest import MANIFEST

__all__ = ["MANIFEST", "make"]


def make(context: ProviderContext) -> Provider:
    # imported here, so that listing the providers does not load it
    from cavvy.providers.digitalocean.cloud import DigitalOceanCloud
    from cavvy.providers.vm.provider import VmProvider

    cloud = DigitalOceanCloud(context.settings, context.now)
    return VmProvider(MANIFEST, context, cloud, identity=cloud.identity, close=cloud.close)
