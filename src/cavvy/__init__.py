"""Cavvy: one control plane for every GPU a team can rent or own."""

__version__ = "0.1.0"
