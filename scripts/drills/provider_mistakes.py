"""Plants mistakes in three providers, one at a time, and prints which of them the contract suite
finds: `python scripts/drills/provider_mistakes.py [WORD]`. With WORD, only mistakes whose words
contain it are planted. The exit status is 1 if a mistake is not found.

The providers are the example in examples/provider, the provider of Vultr, and the made-up cloud with
zones in tests/contract. Only the suite that ships with Cavvy runs, without the providers' own tests.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
AT_ONCE = 2
LONGEST_S = 300


class Target(NamedTuple):
    """A provider, the file with its cloud, and where its stand-in is imported from."""

    package: Path
    cloud: str  # the file in which mistakes are planted, relative to a package
    kind: str  # the class in that file
    stand_in: str


TARGETS = {
    "example": Target(
        ROOT / "examples/provider/prairie_provider",
        "cloud.py",
        "PrairieCloud",
        "from prairie_stand_in import PrairieStandIn as StandIn",
    ),
    "vultr": Target(
        ROOT / "src/cavvy/providers/vultr.py",
        "",
        "VultrCloud",
        "from tests.contract.vultr_stand_in import VultrStandIn as StandIn",
    ),
    "zoned": Target(
        ROOT / "tests/contract/zoned_provider.py",
        "",
        "SteppeCloud",
        "from tests.contract.zoned_stand_in import SteppeStandIn as StandIn",
    ),
}


class Mistake(NamedTuple):
    """A replacement in a provider's cloud."""

    target: str
    kind: str
    words: str
    old: str
    new: str


EX, VU, ZO = "example", "vultr", "zoned"
_RATE = 'rate=self.account.rate(plan["usd_an_hour"])'
_DELETE = 'await self._api.send("DELETE", f"/servers/{machine}?disk=delete")'
_POST = 'told = await self._api.send("POST", "/servers", body)'
_CREATED = 'created_at=datetime.fromisoformat(told["created"])'
_LIST = 'return [_read(each) for each in keep_ours(await self._all("/servers", "servers"))]'
_GET = 'return _read((await self._api.get(f"/servers/{machine}"))["server"])'
_FULL = 'return fault.code == "sold_out"'
_MEMORY = 'accelerator_memory_mib=plan["gpu_gib"] * 1024'
_NAME = '"name": request.names[0]'

MISTAKES: Sequence[Mistake] = (
    # the nine of the review, the first of which concern the zoned provider's euros
    Mistake(
        EX,
        "names",
        "the mark is overwritten",
        _NAME,
        '"name": "cv-0000000000" + request.names[0][13:]',
    ),
    Mistake(EX, "states", "a removed machine runs", _DELETE, "return"),
    Mistake(
        EX,
        "units",
        "a price per month as per hour",
        _RATE,
        'rate=self.account.rate(float(plan["usd_an_hour"]) * 730)',
    ),
    Mistake(ZO, "currency", "euros as dollars", 'currency="EUR"', 'currency="USD"'),
    Mistake(
        EX,
        "counts",
        "one GPU for eight",
        'accelerator_count=plan["gpus"]',
        'accelerator_count=min(1, plan["gpus"])',
    ),
    Mistake(
        EX, "units", "GiB as MiB of GPU memory", _MEMORY, 'accelerator_memory_mib=plan["gpu_gib"]'
    ),
    Mistake(EX, "times", "created two days later", _CREATED, _CREATED + " + timedelta(days=2)"),
    Mistake(EX, "errors", "a full cloud is not known as full", _FULL, "return False"),
    Mistake(
        EX,
        "states",
        "a server that is off runs",
        '"off": MachineState.STOPPED',
        '"off": MachineState.RUNNING',
    ),
    # units
    Mistake(
        EX,
        "units",
        "a price per second",
        _RATE,
        'rate=self.account.rate(float(plan["usd_an_hour"]) / 3600)',
    ),
    Mistake(
        EX,
        "units",
        "a price per minute",
        _RATE,
        'rate=self.account.rate(float(plan["usd_an_hour"]) / 60)',
    ),
    Mistake(
        EX,
        "units",
        "GB as GiB of memory",
        'memory_mib=plan["memory_gib"] * 1024',
        'memory_mib=plan["memory_gib"] * 1_000_000_000 // 2**20',
    ),
    Mistake(
        EX,
        "units",
        "thousands as MiB",
        'memory_mib=plan["memory_gib"] * 1024',
        'memory_mib=plan["memory_gib"] * 1000',
    ),
    Mistake(EX, "units", "the memory of all GPUs as of one", _MEMORY, _MEMORY + ' * plan["gpus"]'),
    Mistake(
        EX,
        "units",
        "the price of one GPU for the machine",
        _RATE,
        'rate=self.account.rate(float(plan["usd_an_hour"]) / max(1, plan["gpus"]))',
    ),
    Mistake(EX, "units", "a free machine", _RATE, "rate=self.account.rate(0)"),
    Mistake(
        EX,
        "units",
        "the disk in MiB",
        'disk_gib=plan["disk_gib"]',
        'disk_gib=plan["disk_gib"] * 1024',
    ),
    Mistake(ZO, "units", "a month of 24 hours", "_MONTH_H = 730", "_MONTH_H = 24"),
    Mistake(ZO, "units", "bytes as millions", "// 2**20", "// 1_000_000"),
    Mistake(
        VU, "units", "the price of a month", 'else plan["hourly_cost"]', 'else plan["monthly_cost"]'
    ),
    Mistake(
        VU, "units", "the memory of all GPUs as of one", "* 1024 // gpus if gpus", "* 1024 if gpus"
    ),
    # currency
    Mistake(
        EX,
        "currency",
        "dollars as euros",
        _RATE,
        'rate=self.account.rate(float(plan["usd_an_hour"]) * 1.1607)',
    ),
    Mistake(
        EX,
        "currency",
        "cents as dollars",
        _RATE,
        'rate=self.account.rate(float(plan["usd_an_hour"]) * 100)',
    ),
    # counts
    Mistake(EX, "counts", "threads as cores", 'vcpus=plan["cpus"]', 'vcpus=plan["cpus"] * 2'),
    Mistake(
        EX, "counts", "CPUs and memory exchanged", 'vcpus=plan["cpus"]', 'vcpus=plan["memory_gib"]'
    ),
    Mistake(
        VU,
        "counts",
        "one GPU for eight",
        "accelerator_count=gpus",
        "accelerator_count=min(1, gpus)",
    ),
    # what is sold
    Mistake(
        EX, "names", "the wrong accelerator", "known.accelerator.name if known", '"L4" if known'
    ),
    Mistake(EX, "names", "on demand as spot", "rate=self", "purchase=Purchase.SPOT, rate=self"),
    Mistake(ZO, "names", "a missing zone", "            zone=zone,\n", ""),
    Mistake(
        VU,
        "names",
        "a price of a region ignored",
        'usd = costs[region]["hourly_cost"] if region in costs else plan',
        "usd = plan",
    ),
    Mistake(
        EX,
        "paging",
        "only the first page of plans",
        'lambda page: page["next"]',
        'lambda page: None if "plans" in page else page["next"]',
    ),
    Mistake(
        EX,
        "paging",
        "only the first page of servers",
        'lambda page: page["next"]',
        'lambda page: None if "servers" in page else page["next"]',
    ),
    Mistake(
        ZO,
        "paging",
        "only the first page",
        'pages = await self._api.numbered_pages(f"{path}?page={{page}}")',
        'pages = [await self._api.get(f"{path}?page=1")]',
    ),
    Mistake(
        VU,
        "paging",
        "only the first page",
        'return f"{first}&cursor={cursor}" if cursor else None',
        "return None",
    ),
    # names
    Mistake(EX, "names", "names are cut", _NAME, '"name": request.names[0][:40]'),
    Mistake(EX, "names", "names in upper case", _NAME, '"name": request.names[0].upper()'),
    Mistake(
        EX,
        "names",
        "deletion of all machines by prefix",
        _DELETE,
        'for each in await self._all("/servers", "servers"):\n            if str(each.get("name")).startswith("cv-"):\n                await self._api.send("DELETE", f"/servers/{each[\'id\']}?disk=delete")',
    ),
    Mistake(
        EX,
        "names",
        "deletion of all machines of the installation",
        _DELETE,
        'told = await self._all("/servers", "servers")\n        mark = next((str(each["name"])[:13] for each in told if each["id"] == machine), "-")\n        for each in told:\n            if str(each.get("name")).startswith(mark):\n                await self._api.send("DELETE", f"/servers/{each[\'id\']}?disk=delete")',
    ),
    # places
    Mistake(
        EX, "places", "the region is ignored", '"region": request.offer.region', '"region": "north"'
    ),
    Mistake(
        EX,
        "places",
        "the setting of regions is ignored",
        'if self.account.allows(each["region"])',
        "if True",
    ),
    Mistake(
        EX,
        "places",
        "the plan is ignored",
        '"plan": request.offer.instance_type',
        '"plan": "small"',
    ),
    Mistake(
        VU, "places", "the region is ignored", '"region": request.offer.region', '"region": "ewr"'
    ),
    Mistake(
        ZO,
        "places",
        "the zone is ignored",
        "zone, name = str(request.offer.zone)",
        'zone, name = "east-1"',
    ),
    Mistake(
        ZO,
        "places",
        "one zone is forgotten",
        'ZONES = ("east-1", "east-2", "west-1")',
        'ZONES = ("east-1", "east-2")',
    ),
    # errors
    Mistake(EX, "errors", "each error means full", _FULL, "return True"),
    Mistake(
        EX,
        "errors",
        "the quota is unknown",
        'quota_codes=frozenset({"limit"})',
        "quota_codes=frozenset()",
    ),
    Mistake(
        EX,
        "errors",
        "the status 400 of a creation is swallowed",
        _POST,
        f"try:\n            {_POST}\n        except CloudFault as fault:\n            if fault.status != 400:\n                raise\n            return []",
    ),
    Mistake(
        EX,
        "errors",
        "errors of a deletion are swallowed",
        _DELETE,
        f"try:\n            {_DELETE}\n        except CloudFault:\n            return",
    ),
    Mistake(
        EX,
        "errors",
        "a creation is repeated",
        _POST,
        f"try:\n            {_POST}\n        except CloudFault:\n            {_POST}",
    ),
    Mistake(
        EX,
        "errors",
        "a failed list is empty",
        _LIST,
        f"try:\n            {_LIST}\n        except CloudFault:\n            return []",
    ),
    Mistake(
        EX,
        "errors",
        "every fault is temporary",
        _POST,
        f"try:\n            {_POST}\n        except CloudFault as fault:\n            raise CloudFault(503, fault.code, fault.message) from fault",
    ),
    Mistake(
        EX,
        "errors",
        "a throttle is final",
        _POST,
        f"try:\n            {_POST}\n        except CloudFault as fault:\n            raise CloudFault(400 if fault.status == 429 else fault.status, fault.code) from fault",
    ),
    Mistake(
        EX,
        "errors",
        "failed offers are none",
        'plans = await self._all("/plans", "plans")',
        'try:\n            plans = await self._all("/plans", "plans")\n        except CloudFault:\n            plans = []',
    ),
    Mistake(
        VU,
        "errors",
        "a full region is not known as full",
        "return fault.status == 400 and _FULL.search(fault.message) is not None",
        "return False",
    ),
    # times
    Mistake(
        EX,
        "times",
        "UTC read as local time",
        _CREATED,
        'created_at=datetime.fromisoformat(told["created"]).replace(tzinfo=None).astimezone()',
    ),
    Mistake(
        EX,
        "times",
        "day and month exchanged",
        _CREATED,
        'created_at=(lambda at: at.replace(month=at.day, day=at.month))(datetime.fromisoformat(told["created"]))',
    ),
    Mistake(EX, "times", "the clock of this machine", _CREATED, "created_at=datetime.now(tz=UTC)"),
    Mistake(
        EX,
        "times",
        "a 12-hour clock",
        _CREATED,
        'created_at=(lambda at: at.replace(hour=at.hour % 12))(datetime.fromisoformat(told["created"]))',
    ),
    # leftovers
    Mistake(EX, "leftovers", "the disk stays", "?disk=delete", ""),
    Mistake(
        ZO,
        "leftovers",
        "volumes stay",
        'await self._api.send("DELETE", f"/zones/{zone}/volumes/{number}")',
        "del zone, number",
    ),
    Mistake(ZO, "leftovers", "a machine that is not on yet counts", "created_off=True,", ""),
    Mistake(
        ZO,
        "leftovers",
        "the machine is never switched on",
        'partial(self._api.send, "POST", f"{path}/action", {"action": "poweron"}),',
        "",
    ),
    # what the machine gets
    Mistake(
        EX,
        "script",
        "the script is cut",
        '"script": request.user_data[0]',
        '"script": request.user_data[0][:4096]',
    ),
    Mistake(
        EX,
        "script",
        "the script in Base64",
        '"script": request.user_data[0]',
        '"script": base64.b64encode(request.user_data[0].encode()).decode()',
    ),
    Mistake(
        VU,
        "script",
        "the script not in Base64",
        "base64.b64encode(request.user_data[0].encode()).decode()",
        "request.user_data[0]",
    ),
    Mistake(
        VU,
        "script",
        "the address is not reported",
        "address=None if address in _NO_ADDRESS else address",
        "address=None",
    ),
    # invented afterwards, without a look at the suite
    Mistake(EX, "names", "the name as the id", 'id=told["id"]', 'id=told["name"]'),
    Mistake(
        EX, "names", "the gang's name as the machine's", _NAME, '"name": request.gang.name[:60]'
    ),
    Mistake(
        EX,
        "states",
        "only servers that are up are listed",
        _LIST,
        'told = keep_ours(await self._all("/servers", "servers"))\n        return [_read(each) for each in told if each["state"] == "up"]',
    ),
    Mistake(EX, "states", "a server is never found", _GET, "return None"),
    Mistake(
        EX,
        "states",
        "a server that boots runs",
        '"building": MachineState.STARTING',
        '"building": MachineState.RUNNING',
    ),
    Mistake(EX, "errors", "a deletion is not awaited", _DELETE, _DELETE.replace("await ", "_ = ")),
    Mistake(
        EX,
        "errors",
        "the key of another account",
        "KEYS, lambda told",
        'KEYS, read_key=lambda: "x", read_error=lambda told',
    ),
    Mistake(
        EX,
        "units",
        "a price in whole cents",
        _RATE,
        'rate=self.account.rate(round(float(plan["usd_an_hour"]), 1))',
    ),
    Mistake(
        EX,
        "names",
        "an unknown GPU as none",
        'if not each["gpu"] or identify(each["gpu"])',
        "if True",
    ),
    Mistake(
        EX,
        "counts",
        "one offer for each GPU",
        'accelerator_count=plan["gpus"]',
        'accelerator_count=1 if plan["gpus"] else 0',
    ),
    Mistake(
        ZO,
        "names",
        "the id without the zone",
        'id=join_id(zone, str(told["id"]))',
        'id=str(told["id"])',
    ),
    Mistake(ZO, "leftovers", "no script on the machine", "request.user_data[0]", '"#!/bin/sh"'),
    Mistake(
        ZO,
        "errors",
        "a silent zone has no machines",
        "machines = await list_regions(self._zones, self._list_zone, _region)",
        "machines = await self.account.ask_zones(self._zones, self._list_zone)",
    ),
    Mistake(ZO, "places", "the region as the zone", "zone=zone,", "zone=_region(zone),"),
    Mistake(
        VU,
        "units",
        "a shortest charge of a minute",
        "minimum_charge=timedelta(hours=1)",
        "minimum_charge=timedelta(minutes=1)",
    ),
    Mistake(
        EX,
        "units",
        "a shortest charge of a day",
        "rate=self",
        "minimum_charge=timedelta(days=1), rate=self",
    ),
    Mistake(
        VU,
        "errors",
        "the limit of the account is not known",
        "raise self.name_limit(fault) from fault",
        "raise",
    ),
    Mistake(
        VU,
        "states",
        "a suspended instance is deleted",
        "quiet = status",
        'state = MachineState.ENDED if status == "active" else state\n    quiet = status',
    ),
)
_IMPORTS = "import base64\nfrom datetime import UTC\nfrom cavvy.domain.offers import Purchase\n"


def plant(mistake: Mistake, folder: Path) -> None:
    """Copy the provider into the folder, with the mistake, and a test that runs the suite."""
    target = TARGETS[mistake.target]
    module = "prairie_provider" if mistake.target == EX else "planted"
    if target.cloud:
        shutil.copytree(
            target.package, folder / module, ignore=shutil.ignore_patterns("__pycache__")
        )
        cloud = folder / module / target.cloud
    else:
        cloud = folder / f"{module}.py"
        shutil.copy(target.package, cloud)
    if mistake.target == EX:
        shutil.copy(target.package.with_name("prairie_stand_in.py"), folder)
    text = cloud.read_text().replace("cavvy.providers.vultr", module)
    if mistake.old not in text:
        raise SystemExit(f"{mistake.target}: {mistake.old!r} is not in the provider any more")
    text = text.replace(mistake.old, mistake.new)
    head, _, rest = text.partition('"""\n\n' if '"""\n\n' in text else "\n\n")
    cloud.write_text(f'{head}"""\n\n{_IMPORTS}{rest}')
    imported = f"{module}.cloud" if target.cloud else module
    (folder / "test_planted.py").write_text(
        f"import {module}\n{target.stand_in}\nfrom {imported} import {target.kind}\n"
        "from cavvy.providers.contract.rest_cloud import RestContract\n\n\n"
        "class TestPlanted(RestContract):\n"
        f"    package, traits, stand_in = {module}, {target.kind}.traits, StandIn\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\n")


def run(mistake: Mistake | None, target: str = "") -> tuple[bool, str]:
    """Return whether the suite fails, and its first failure."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant(mistake or Mistake(target, "", "", "class ", "class "), folder)
        told = subprocess.run(
            [sys.executable, "-m", "pytest", "-qx", "--tb=short", "-p", "no:cacheprovider", "-rfE"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
    failed = re.findall(r"^(?:FAILED|ERROR) \S*?::(?:\w+::)?(\S+)(.*)", told.stdout, re.MULTILINE)
    errors = re.findall(r"^E   +(\S.*)", told.stdout, re.MULTILINE)
    if told.returncode not in (0, 1) or (told.returncode and not failed):
        raise SystemExit(f"the suite did not run: {told.stdout[-1500:]}{told.stderr[-500:]}")
    return told.returncode == 1, f"{failed[0][0]}: {errors[0] if errors else ''}" if failed else ""


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [each for each in MISTAKES if word in " ".join(each[:3])]
    for each in sorted({each.target for each in chosen}):
        broken, how = run(None, each)
        if broken:
            raise SystemExit(f"{each} without a mistake fails: {how}")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(run, chosen))
    print("| provider | kind | mistake | found | by |\n|---|---|---|---|---|")
    for each, (found, how) in zip(chosen, results, strict=True):
        words = how.replace("|", "/")[:150]
        print(
            f"| {each.target} | {each.kind} | {each.words} | {'yes' if found else '**no**'} | {words} |"
        )
    missed = sum(not found for found, _ in results)
    print(f"\n{len(chosen) - missed} of {len(chosen)} mistakes were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
