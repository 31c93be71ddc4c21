"""Readers of the bills of clouds: these modules convert the rows of a file to `BillLine`s."""

from cavvy.importers.bills.formats import FORMATS, UnknownBill, find_format, read_bill
from cavvy.importers.bills.rows import BillFileError

__all__ = ["FORMATS", "BillFileError", "UnknownBill", "find_format", "read_bill"]
