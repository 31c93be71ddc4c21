"""Shows the keys of offers in parts that people read faster."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PlacementText:
    """The parts of an offer's key. `purchase` is "" if the text is no key."""

    key: str
    machine: str  # the type of the machine, such as p5.48xlarge
    gpus: str  # the GPUs of one node, such as "8 GPUs"
    where: str  # the account, the region and the zone
    purchase: str


def read_placement(key: str) -> PlacementText:
    """Split a key such as aws/us-east-1/us-east-1a/p5.48xlarge:8/spot. A text that is no key
    becomes the machine.
    """
    account, _, rest = key.partition("/")
    region, _, rest = rest.partition("/")
    rest, _, purchase = rest.rpartition("/")
    machine, _, count = rest.rpartition(":")
    if not (machine and count.isascii() and count.isdigit()):
        return PlacementText(key, key, "", "", "")
    zone, _, kind = machine.rpartition("/")
    # A zone's name usually contains its region's name.
    place = [region] if not zone else [zone] if zone.startswith(region) else [region, zone]
    return PlacementText(key, kind, _name_gpus(int(count)), " ".join([account, *place]), purchase)


def _name_gpus(count: int) -> str:
    return "" if count == 0 else "1 GPU" if count == 1 else f"{count} GPUs"
