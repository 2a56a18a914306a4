"""Numbers and tables as plain text that reads well in a terminal and pastes well into a page."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = (), left: int = 1,
          indent: int = 2) -> str:
    """Rows of cells as aligned columns: the first `left` columns to the left, the others to the
    right. Every row has as many cells as the first."""
    lines = [tuple(header), *map(tuple, rows)] if header else list(map(tuple, rows))
    if not lines:
        return ""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        (" " * indent + "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True)))).rstrip()
        for line in lines)


def size(nbytes: float) -> str:
    """A number of bytes in binary units: ``93.8 MiB``; below 1 KiB ``512 B``."""
    power = 0
    while nbytes >= 1024 and power < 5:
        nbytes /= 1024
        power += 1
    return f"{nbytes:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def short(number: float) -> str:
    """A count in three digits with a decimal suffix: ``135 M``, ``7.62 G``; below 1000 as it is."""
    power = 0
    while number >= 999.5 and power < 6:
        number /= 1000
        power += 1
    digits = 0 if not power or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f}{('', ' k', ' M', ' G', ' T', ' P', ' E')[power]}"
