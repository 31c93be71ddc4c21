"""Builds short resource names for Azure; the names must be unique in a region."""

import hashlib

NAME_TAG = "cavvy-name"  # the tag with the name that the layer gave


def make_short_name(name: str) -> str:
    """Return a short resource name for a name from `providers.vm`: Azure allows at most 24
    characters for compute instances, and 32 for online endpoints.
    """
    return f"cv{hashlib.sha256(name.encode()).hexdigest()[:20]}"
