"""Records the calls to a cloud while a gang of `cavvy check NAME --live` exists. The file contains
no secrets, and a simulated cloud can replay the file's calls in tests.

A string in a call is recorded only if the string is known to be safe. Safe strings are the values
of fields in `_KEPT`, the strings in replies about products (`_PRODUCTS`), and the names of objects
that Cavvy created. Strings that are not known to be safe are masked. Objects in the account that
Cavvy did not create, such as other machines, are omitted.
"""

import asyncio
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from datetime import datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from cavvy.domain.values import Struct, field
from cavvy.providers.base import GangSpec
from cavvy.providers.ledger import LaunchLedger, NamedRecord

_N = TypeVar("_N", bound=NamedRecord)

TAG = "cavvy-live-check"  # the calls for a gang with this label are recorded
FOLDER = "recordings"  # a subfolder of the provider's own folder
LONGEST_JOB = timedelta(minutes=10)  # gangs that may run longer are not recorded
_MOST_OPEN = 4  # the maximum number of gangs that are recorded at the same time
_MOST_CHARACTERS = 32 * 2**20  # the maximum size of a recording; calls beyond it are not recorded
# `check --live` waits 20 minutes for the agent and 10 minutes for the removal
_LONGEST_S = 45 * 60.0
_MASK = "redacted"

_OURS = re.compile(r"cv-[\w-]+")  # a name of an object that Cavvy made
_OUR_FIELD = "cavvy"  # the beginning of the names of Cavvy's tags
_OUR_TEXT = re.compile(r"cv-[\w-]+|cavvy[:-][\w:-]+")
# The replies to these calls describe products, which are the same for all customers.
_PRODUCTS = re.compile(
    r"GET /(?:\S*/)?(?:plans|os|sizes|instance-types|instance-availability|flavors|pricebook|gpus"
    r"|datacenters|types|capacities|machine-types-2|public-images|skus|machineTypes"
    r"|acceleratorTypes|regions"
    r"|zones|os-templates)(?:\?|$)"
    r"|\S+ ec2 describe_(?:instance_types|instance_type_offerings|spot_price_history|regions"
    r"|availability_zones)$|\S+ (?:pricing|service-quotas|ssm) ",
)
_EC2 = re.compile(r"\S+ ec2 ")
# The objects in the replies to these calls have names that users chose. The objects themselves are
# recorded, because a replay needs them, but all their strings and numbers are masked.
_CHOICES = re.compile(
    r"GET /(?:\S*/)?(?:ssh-keys|ssh_keys/|keypairs|environments|projects)(?:\?|$)"
)
# The names of fields whose values are kept, in lower case and without "_" and "-".
_KEPT_FIELDS = """
    id instanceid instanceids imageid vpcid subnetid groupid volumeid allocationid reservationid
    networkinterfaceid spotinstancerequestid internetgatewayid gatewayid routetableid
    status state states powerstatus powerstate serverstatus provisioningstate statuses displaystatus
    code message reason statereason statetransitionreason currentstate previousstate operationtype
    region regionname location locationcode zone availabilityzone availabilityzoneid placement
    type kind plan size sizeslug flavorname instancetype instancetypename machinetype vmsize
    hardwareprofile architecture instancelifecycle lifecycle priority resourcetype
    createdat datecreated creationtimestamp timecreated createtime launchtime starttime
    ip mainip internalip privateip fixedip floatingip ipaddress publicipaddress privateipaddress
    networkip natip attachments attachment cidrblock destinationcidrblock
    next prev nextlink nexttoken nextpagetoken pages
"""
_KEPT = frozenset(_KEPT_FIELDS.split())
_NAMES = frozenset({"id", "name", "label", "hostname", "displayname", "title"})
# The values of these fields are secret, or identify the account or a person. They are masked even
# in replies about products.
_SECRET = re.compile(
    r"token$|subscription_?id|secret|password|(user|custom|key)_?data|(private|public)_?key"
    r"|material|jupyter|authorization"
    r"|credential|account|owner|client_?id|e_?mail|fingerprint|^arn$|^user_?id$|kvm|console|vnc",
    re.IGNORECASE,
)
_SCRIPTS = ("#!", "IyEv")  # how user data starts, as plain text and in Base64
_PAGES = frozenset({"nexttoken", "nextpagetoken"})  # tokens that only name the next page of a list
# Ids of AWS accounts, Azure subscriptions, Google projects and OCI tenancies; names of resource
# groups; e-mail addresses; and AWS's names of identities. The pattern also finds them within longer
# strings.
_ACCOUNT = re.compile(
    r"(?<!\d)\d{12}(?!\d)|(?<=subscriptions/)[\w-]+|(?<=resourcegroups/)[^/\s?]+"
    r"|(?<=projects/)[\w:.-]+|[\w.+-]+@[\w-]+\.[\w.-]+|(?<=arn:)\S+"
    r"|ocid1\.(?:tenancy|compartment|user)\.[\w.-]+",
    re.IGNORECASE,
)
_NO_ACCOUNT = "0" * 12
# a number is masked if its field's name ends with one of these words
_NUMBER_OF = ("id", "number", "phone")


class _Recording(Struct, kw_only=True):
    """The calls for one gang, in order. `began` is the start of the recording, in seconds of the
    recorder's clock. `latest` maps each read-only call to its last reply, and is cleared by each
    write call.
    """

    began: float
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    latest: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    characters: int = 0

    def add(self, call: Mapping[str, Any], characters: int) -> None:
        """Add a call. A read-only call whose reply has not changed is not stored a second time."""
        if self.latest.get(call["call"]) == call:
            return
        if self.characters + characters > _MOST_CHARACTERS:
            return
        if call["writes"]:
            self.latest.clear()
        else:
            self.latest[call["call"]] = call
        self.calls.append(call)
        self.characters += characters


class CallRecorder:
    """Records one provider's calls for gangs that have the label `TAG`. While no gang has the label
    `TAG`, nothing is recorded. `clock` returns seconds that never decrease.
    """

    def __init__(
        self,
        home: Path,
        provider: str,
        installation: str,
        clock: Callable[[], float] = monotonic,
        safe: Collection[str] = (),
    ) -> None:
        """`safe` names fields whose values are kept, in addition to `_KEPT_FIELDS`."""
        self._clock, self._kept = clock, _KEPT.union(map(_fold, safe))
        self._folder = home / FOLDER
        self._head = {"provider": provider, "installation": installation}
        self._open: dict[str, _Recording] = {}

    def begin(self, gang: GangSpec) -> bool:
        """Start a recording if the gang has the label, its time limit is at most `LONGEST_JOB`, and
        fewer than `_MOST_OPEN` gangs are being recorded. Return whether a recording was started.
        """
        self._drop_old()
        short = gang.longest is not None and gang.longest <= LONGEST_JOB
        if TAG not in gang.labels or not short or gang.name in self._open:
            return False
        if len(self._open) >= _MOST_OPEN:
            return False
        self._open[gang.name] = _Recording(began=self._clock())
        return True

    def recorded(self) -> Sequence[str]:
        """Return the names of the gangs that are being recorded."""
        self._drop_old()
        return list(self._open)

    def add(
        self,
        call: str,
        body: object,
        outcome: Mapping[str, object],
        *,
        writes: bool,
        root: str = "",
    ) -> None:
        """Record a call and its outcome. `root` is the address of the API. This address is removed
        from strings in replies.
        """
        self._drop_old()
        if not self._open:
            return
        told = {
            "call": _clean(call),
            "writes": writes,
            "body": redact_body(body, self._kept),
            **outcome,
            "reply": redact_reply(call, outcome.get("reply"), self._kept),
        }
        text = json.dumps(told, default=_plain)
        plain = json.loads(text.replace(root, "ENDPOINT") if root else text)
        for each in self._open.values():
            each.add(plain, len(text))

    async def end(self, gang: str) -> None:
        """End the gang's recording, if one exists, and write the recording to a file."""
        recording = self._open.pop(gang, None)
        if recording is not None:
            whole = {**self._head, "gang": gang, "calls": recording.calls}
            await asyncio.to_thread(self._write, gang, json.dumps(whole, indent=1))

    async def end_finished(self, ledger: LaunchLedger[_N], is_over: Callable[[_N], bool]) -> None:
        """End the recordings of gangs without machines, and write these recordings to files. A gang
        has no machines if the provider's ledger contains no record of the gang, or if `is_over`
        returns True for the record.
        """
        for name in self.recorded():
            if ledger.lock(name).locked():  # a launch or a removal of the gang is in progress
                continue
            record = ledger.get(name)
            if record is None or is_over(record):
                await self.end(name)

    def _drop_old(self) -> None:
        """Discard recordings that were never ended."""
        since = self._clock() - _LONGEST_S
        self._open = {name: each for name, each in self._open.items() if each.began >= since}

    def _write(self, gang: str, text: str) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{gang}.json"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)


def redact_body(body: object, kept: Set[str] = _KEPT) -> object:
    """Return a copy of a request's body, with secrets, account ids and user-chosen names masked."""
    return _keep_safe(body, kept, ours=True)


def redact_reply(call: str, reply: object, kept: Set[str] = _KEPT) -> object:
    """Return a copy of a reply, without the objects that Cavvy did not create, and with secrets,
    account ids and user-chosen names masked. `call` is the method and the path or, for AWS, the
    region, the service and the operation.
    """
    if isinstance(reply, str):  # an id, or the message of an error
        return _clean(reply)
    if _PRODUCTS.match(call):
        return _mask_secrets(reply)
    if _CHOICES.match(call):
        return _mask_all(reply)
    # EC2 lists only objects with Cavvy's tags; their names are in tags, which are masked
    return _keep_safe(reply, kept, ours=_EC2.match(call) is not None)


def _keep_safe(value: object, kept: Set[str], *, ours: bool) -> object:
    """Return a copy of the value, with all strings masked except strings that are known to be safe.
    If `ours` is True, the value belongs to an object that Cavvy created, so no items are removed
    from the lists in the value.
    """
    match value:
        case Mapping():
            mine = ours or _is_ours(value)
            return {
                _clean(str(key)): _keep_field(str(key), each, value, kept, ours=mine)
                for key, each in value.items()
            }
        case list() | tuple():
            shown = [each for each in value if ours or not _is_foreign(each)]
            return [_keep_safe(each, kept, ours=ours) for each in shown]
        case str():
            return value if not value or _OUR_TEXT.fullmatch(value) else _MASK
    return value


def _keep_field(
    key: str, value: object, table: Mapping[object, object], kept: Set[str], *, ours: bool
) -> object:
    name = _fold(key)
    if value and _is_secret(key):
        return _MASK
    tag = name == "value" and str(table.get("key", table.get("Key"))).startswith(_OUR_FIELD)
    if name in kept or name.startswith(_OUR_FIELD) or tag:
        return _mask_secrets(value)
    if type(value) is int and name.endswith(_NUMBER_OF):
        return 0
    return _keep_safe(value, kept, ours=ours)


def _mask_secrets(value: object) -> object:
    """Return the value, with secrets and account ids masked."""
    match value:
        case Mapping():
            return {
                _clean(str(key)): _MASK if each and _is_secret(str(key)) else _mask_secrets(each)
                for key, each in value.items()
            }
        case list() | tuple():
            return [_mask_secrets(each) for each in value]
        case str():
            return _clean(value)
    return value


def _mask_all(value: object) -> object:
    """Return the value, with all strings and numbers masked."""
    match value:
        case Mapping():
            return {str(key): _mask_all(each) for key, each in value.items()}
        case list() | tuple():
            return [_mask_all(each) for each in value]
        case str():
            return value and _MASK
        case bool():
            return value
        case int() | float():
            return 0
    return value


def _clean(text: str) -> str:
    return _MASK if text.startswith(_SCRIPTS) else _ACCOUNT.sub(_NO_ACCOUNT, text)


def _fold(field_name: str) -> str:
    return re.sub(r"[_-]", "", field_name).lower()


def _is_secret(field_name: str) -> bool:
    return _fold(field_name) not in _PAGES and _SECRET.search(field_name) is not None


def _is_ours(table: Mapping[object, object]) -> bool:
    """Return whether the table describes an object that Cavvy created: a string in the table is the
    name of such an object, or a path that ends with such a name.
    """
    return any(
        isinstance(each, str) and _OURS.fullmatch(each.rsplit("/")[-1]) for each in table.values()
    )


def _is_foreign(value: object) -> bool:
    """Return whether the value describes an object that is in the account but was not created by
    Cavvy.
    """
    if not isinstance(value, Mapping) or _is_ours(value):
        return False
    return any(_fold(str(key)) in _NAMES for key in value)


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return {"$time": value.isoformat()}
    return str(value)
