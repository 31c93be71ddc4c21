"""Names of resources that Azure limits to a few characters and that are unique in a region."""

import hashlib

NAME_TAG = "cavvy-name"  # the tag with the name that the layer gave


def make_short_name(name: str) -> str:
    """Return the name of the resource for a name that the layer chose: compute instances have at
    most 24 characters, online endpoints 32.
    """
    return f"cv{hashlib.sha256(name.encode()).hexdigest()[:20]}"
