"""What is wrong with data is said with its file and line."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be trained on: unreadable, malformed, or nothing at all."""
