"""The folder in which Kilter keeps what it makes: kernels, pulled models, tokenised data."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """``$KILTER_HOME``, else ``~/.cache/kilter``."""
    return Path(os.environ.get("KILTER_HOME") or Path.home() / ".cache" / "kilter")
