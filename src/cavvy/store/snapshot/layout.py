"""The tables of a snapshot and its errors. An offer is a pair of an instance type (`shape`) and a
location (`place`), so that the file stays small.

* SnapshotError     this program cannot use the file as a catalog; the message states what to do

Rows are numbered in the order of their names, so that offers with equal prices always have the same
order. The table `shape` contains the number of offers of each instance type, for each purchase
option. If a requirement limits neither location nor price, its offers can be counted without
reading the table `offer`. In the table `offer`, the columns of the primary key come first, in the
order of the key. In any other order, the integrity check of SQLite 3.40 would report existing
values as missing.
"""

from cavvy.domain.offers import Purchase

SCHEMA_VERSION = 3

# The numbers in the column `offer.purchase`, in the order of the names of purchase options.
PURCHASE_NUMBERS: dict[Purchase, int] = {
    Purchase.ON_DEMAND: 0,
    Purchase.RESERVED: 1,
    Purchase.SPOT: 2,
}
PURCHASE_COLUMNS: dict[Purchase, str] = {
    Purchase.ON_DEMAND: "on_demand",
    Purchase.RESERVED: "reserved",
    Purchase.SPOT: "spot",
}

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE source (id INTEGER PRIMARY KEY, name TEXT NOT NULL, as_of TEXT NOT NULL);
CREATE TABLE place (
    id INTEGER PRIMARY KEY, provider TEXT NOT NULL, region TEXT NOT NULL COLLATE NOCASE,
    zone TEXT COLLATE NOCASE, country TEXT, area TEXT, rows INTEGER NOT NULL);
CREATE TABLE pack (
    id INTEGER PRIMARY KEY, accelerator TEXT, count INTEGER NOT NULL, memory_mib INTEGER NOT NULL,
    part REAL NOT NULL, on_demand INTEGER NOT NULL, reserved INTEGER NOT NULL,
    spot INTEGER NOT NULL);
CREATE TABLE shape (
    id INTEGER PRIMARY KEY, provider TEXT NOT NULL, instance_type TEXT NOT NULL COLLATE NOCASE,
    pack INTEGER NOT NULL REFERENCES pack, vcpus REAL NOT NULL, memory_mib INTEGER NOT NULL,
    disk_gib INTEGER, network_mbps INTEGER, hosts INTEGER NOT NULL, on_demand INTEGER NOT NULL,
    reserved INTEGER NOT NULL, spot INTEGER NOT NULL);
CREATE TABLE offer (
    shape INTEGER NOT NULL REFERENCES shape, purchase INTEGER NOT NULL, rate INTEGER NOT NULL,
    place INTEGER NOT NULL REFERENCES place, term_months INTEGER NOT NULL,
    source INTEGER NOT NULL REFERENCES source,
    PRIMARY KEY (shape, purchase, rate, place, term_months)) WITHOUT ROWID;
CREATE TABLE egress (
    provider TEXT NOT NULL, region TEXT NOT NULL, target TEXT NOT NULL,
    micros_per_gb INTEGER NOT NULL, source INTEGER NOT NULL REFERENCES source,
    PRIMARY KEY (provider, region, target)) WITHOUT ROWID;
"""
INDEXES = """
CREATE INDEX shape_of_pack ON shape (pack);
CREATE INDEX offer_by_rate ON offer (rate, place, shape, purchase);
"""


class SnapshotError(Exception):
    """Raised if the file is not a catalog that this program can use. The message says what to do.
    An instruction that is right only for the user's own catalog is a second argument of the
    exception, so that callers with another file can omit it.
    """

    def __str__(self) -> str:
        return "".join(self.args)
