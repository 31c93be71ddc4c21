"""Readers of the bills of clouds: these modules convert the rows of a file to `BillLine`s."""

from cavvy.importers.bills.formats import FORMATS, BillFormat, UnknownBill, find_format, read_bill
from cavvy.importers.bills.rows import BillFileError

__all__ = ["FORMATS", "BillFileError", "BillFormat", "UnknownBill", "find_format", "read_bill"]
