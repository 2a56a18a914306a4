"""The bytes of a file, decompressed as its suffix says, as a stream."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kilter.train.data.config import COMPRESSED
from kilter.train.data.errors import DataError

_BUFFER = 1 << 20  # bytes


@contextmanager
def opened(path: Path) -> Iterator[tuple[io.BufferedReader, Callable[[], int]]]:
    """(the file's content, how many bytes of the file itself have been read so far).

    Raises DataError for a file that cannot be read or decompressed, while it is read too.
    """
    try:
        with open(path, "rb") as file:
            suffix = path.suffix.lower()
            content: Any = file
            if suffix in COMPRESSED:
                content = io.BufferedReader(_OPENERS[suffix](file, path), _BUFFER)
            yield content, file.tell
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from error
        why = str(error).rstrip(".") or "no reason given"
        raise DataError(f"{path} cannot be decompressed: {why}. It was cut off, or is not what its "
                        "suffix says; copy it anew.") from error


def _zstandard(file: BinaryIO, path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"Reading {path} needs pyarrow. Install it with `pip install "
                        f"'kilter[data]'`, or decompress the file with `zstd -d`.") from error
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")


_OPENERS: dict[str, Callable[[BinaryIO, Path], Any]] = {
    ".gz": lambda file, _: gzip.GzipFile(fileobj=file),
    ".bz2": lambda file, _: bz2.BZ2File(file),
    ".xz": lambda file, _: lzma.LZMAFile(file),  # noqa: SIM115 (the file is closed)
    ".zst": _zstandard,
}
