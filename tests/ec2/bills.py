"""What EC2 would charge for instances beside their machines, by the stand-in's own log."""

from calendar import monthrange
from datetime import datetime, timedelta
from fractions import Fraction

from tests.ec2.cloud import Cloud, Life

_MINUTE = timedelta(minutes=1)
_SECOND = timedelta(seconds=1)


def price_extras(cloud: Cloud, life: Life, began: datetime, ended: datetime) -> Fraction:
    """The micro-dollars for the disks and the public address that an instance was given, for at
    least a minute. EC2 tells both times in whole seconds.
    """
    ended = max(ended, began + _MINUTE)
    root = "BlockDeviceMapping.1.Ebs."
    sizes = [(life.request[f"{root}VolumeType"], int(life.request[f"{root}VolumeSize"]))]
    sizes += [(disk.type, disk.size_gib) for disk in cloud.disks.used_by(life.id)]
    month_usd = sum(Fraction(cloud.rules.disk_prices[kind]) * size for kind, size in sizes)
    cost, at = Fraction(0), began
    while at < ended:
        days = monthrange(at.year, at.month)[1]
        first = at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        until = min(ended, first + timedelta(days=days))
        cost += month_usd * ((until - at) // _SECOND) / (86400 * days)
        at = until
    if life.public:
        cost += Fraction(cloud.rules.address_price) * ((ended - began) // _SECOND) / 3600
    return cost * 1_000_000
