"""Translates the fields that all importers share: names, tags, prices, accelerators, the working
folder, and local files with credentials, which become secrets.
"""

import re

from cavvy.capabilities.importers.readers import as_text, child, entries, text_at
from cavvy.domain.tasks import AcceleratorNeed, Workdir
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.fields.places import check_header_name, check_header_value
from cavvy.spec.fields.workdir import is_commit
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.problems import SourceMark, slug
from cavvy.spec.sent_folders import CREDENTIAL_FILES, CREDENTIALS
from cavvy.spec.tree import Node, ScalarNode

# Requests that a replica processes at the same time; SkyServe and dstack do not limit them.
UNBOUNDED = 1000


def read_name(table: Node, kept_keys: TranslationNotes) -> str | None:
    """Return the job's name, reduced to the characters that Cavvy allows, or None if the file has
    no name.
    """
    name = text_at(table, "name")
    plain = None if name is None else slug(name)
    if plain != name:
        reason = f"names may contain only a-z, 0-9 and -; the job is called {plain}"
        kept_keys.note_at(table, "name", reason)
    return plain


def is_variable_name(text: str) -> bool:
    """Return whether a shell can have a variable of this name: ASCII letters, digits and _."""
    return text.isascii() and text.isidentifier()


def tell_value(name: str, *, is_variable: bool) -> str:
    """Return how to set the value of a secret. A variable without a value can also be set on the
    command line.
    """
    stored = f"set the value with `cavvy secret set {name}`"
    return (
        f"{stored}, or set the value for one job with --env {name}=VALUE" if is_variable else stored
    )


def find_header_problem(name: str, value: str) -> str:
    """Return why a probe cannot send an HTTP header, or "" if the probe can send it."""
    try:
        check_header_value(value)
        check_header_name(name)
    except WrongValue as error:
        return str(error)
    return ""


def read_tags(table: Node, key: str) -> dict[str, str]:
    return {
        name.text: as_text(value)
        for name, value in entries(child(table, key))
        if isinstance(value, ScalarNode)
    }


def read_price(table: Node, key: str) -> HourlyRate | None:
    """Return the price under a key, in dollars per hour, or None if the key is absent."""
    price = text_at(table, key)
    return HourlyRate(round(float(price) * 1_000_000)) if price else None


def read_commit(
    url: str,
    ref: str | None,
    key: str,
    mark: SourceMark,
    advice: str,
    kept_keys: TranslationNotes,
) -> Workdir:
    """Return a working folder from a git repository. If `ref` is a branch or tag instead of a
    commit, the key is reported as unsupported until the task is submitted. At submission, `cavvy
    run` looks up the current commit of the branch or tag.
    """
    commit = (ref or "").lower()
    if not is_commit(commit):
        reason = (
            "a branch or tag can move: `cavvy run` submits its current commit; to pin a commit, "
            f"{advice}"
        )
        kept_keys.refuse(mark, key, reason, until_submitted=True)
        return Workdir(git=url, commit=ref)
    return Workdir(git=url, commit=commit)


# Names that the catalog does not have, and the catalog's name for each. For example, SkyPilot calls
# the MI300X MI300.
_ALIASES = {"mi300": "MI300X"}
# For products with several memory sizes: the size in GiB that SkyPilot means if a file names only
# the product.
BARE_SIZES = {"A100": 40, "V100": 16}
# The names of TPUs at GCP and GKE. dstack writes these names without `tpu-`. The number at the end
# is the number of chips; for the versions in `_CORES`, it is the number of cores, two for each
# chip.
_TPU = re.compile(
    r"(?:tpu-?)?(v[2-7][a-z]?)"
    r"(litepod|-lite-podslice|-lite-device|-podslice|-slice|-device)?(?:-(\d+))?"
)
_CORES = ("v2", "v3", "v4", "v5p")


class TranslatedNeeds(Struct, frozen=True, kw_only=True):
    """The requirements for one accelerator name. `problem` is the reason why Cavvy cannot request
    this accelerator as written, or "" if it can.
    """

    needs: tuple[AcceleratorNeed, ...]
    problem: str = ""


def find_needs(name: str, count: str, memory: str = "") -> TranslatedNeeds:
    """Return the requirements for `count` devices called `name`. `catalog.needs` defines the syntax
    of `count` and `memory`.
    """
    from cavvy.catalog.needs import NeedError, parse_accelerator

    known, chips = _find_name(name)
    if chips is not None:
        count = str(chips)
    text = ":".join(part for part in (known, memory, count) if part)
    try:
        if "|" in name:
            raise NeedError(f"unknown accelerator {name!r}")
        needs = parse_accelerator(text)
        return TranslatedNeeds(needs=needs, problem=_find_problem(known, chips))
    except NeedError as error:
        least = re.match(r"\d{1,6}", count)
        need = AcceleratorNeed(name=name or None, count_min=max(1, int(least[0])) if least else 1)
        return TranslatedNeeds(needs=(need,), problem=str(error))


def _find_name(name: str) -> tuple[str, int | None]:
    """Return the catalog's name, and the number of chips if `name` is the type of a slice of
    TPUs.
    """
    match = _TPU.fullmatch(name.lower())
    if match is None or not (match[3] or name.lower().startswith("tpu")):
        return _ALIASES.get(name.lower(), name), None
    version = match[1] + ("e" if match[1] == "v5" and match[2] and "lite" in match[2] else "")
    if match[3] is None:
        return f"TPU-{version}", None
    return f"TPU-{version}", int(match[3][:6]) // (2 if version in _CORES else 1) or 1


def _find_problem(name: str, chips: int | None) -> str:
    """Return a message if Google has no slice with this number of chips, otherwise ""."""
    from cavvy.catalog.tpu_slices import list_slices

    sizes = [each.chips for each in list_slices() if each.accelerator == name]
    if chips is None or not sizes or chips in sizes:
        return ""
    return f"Google has no slice of {chips} {name} chips; it has {', '.join(map(str, sizes))}"


def move_to_secret(
    path: str, target: str, key: str, mark: SourceMark, kept_keys: TranslationNotes
) -> str | None:
    """If the local file at `path` contains credentials, add a note: the job gets the file as a
    secret and writes the secret to `target` on the node. Returns the name of the secret, or None if
    the path contains no credentials. Raises WrongValue for a folder.
    """
    match = CREDENTIALS.fullmatch(path)
    if match is None:
        return None
    if path.endswith("/") or not (match["file"] or match["folder"] in CREDENTIAL_FILES):
        raise WrongValue(
            f"{path} contains credentials, which are not uploaded; name its files one by one, so "
            "that each becomes a secret"
        )
    name = re.sub(r"[^A-Za-z0-9]+", "_", path.partition("/.")[2]).strip("_").upper() + "_FILE"
    reason = (
        f"{path} contains credentials, which are not uploaded: save them with `cavvy secret set "
        f"{name} --file {path}`; the job writes them to {target} if the node has no such file"
    )
    kept_keys.note(mark, key, reason)
    kept_keys.place_secret(name, target)
    return name
