"""`kilter convert`: what it writes, what it refuses, and that refusing leaves everything alone.

That tensors survive bit for bit, for every family, is tests/weights' business.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kilter.cli import main
from kilter.verbs.convert import parse_size
from kilter.weights.bridge import open_model
from kilter.weights.gguf import GGUFFile
from tests.models import tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny.make("llama-plain", tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_comes_out_as_it_went_in(model: Path, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(model), str(tmp_path / "out")]) == 0
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = load_file(model / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert "Wrote" in capsys.readouterr().out


def test_dtype_and_shards(model: Path, tmp_path: Path) -> None:
    assert main(["convert", str(model), str(tmp_path / "out"), "--dtype", "bfloat16",
                 "--max-shard-size", "30kB"]) == 0
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 1
    written = {k: v for shard in shards for k, v in load_file(shard).items()}
    theirs = load_file(model / "model.safetensors")
    assert all(torch.equal(written[name], theirs[name].bfloat16()) for name in theirs)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == theirs.keys()


def test_a_gguf_file_gets_its_tokenizer(smollm2: Path, tmp_path: Path) -> None:
    """Read back by the oracle: same ids, same prompt."""
    import transformers

    assert main(["convert", "smollm2-135m", str(tmp_path / "out"), "--dtype", "float16"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "In 1984?"}],
                                         tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nIn 1984?<|im_end|>\n<|im_start|>assistant\n")
    # smollm's pre-tokenizer splits digits one by one.
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1984")] == ["1", "9", "8", "4"]
    source, out = open_model(smollm2), open_model(tmp_path / "out")
    assert isinstance(source.store, GGUFFile) and out.eos_token_ids == source.eos_token_ids
    assert out.spec == source.spec


def refuse(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and "Traceback" not in err


def test_an_existing_destination_is_safe(model: Path, tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    out, notes = tmp_path / "out", tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("years of work")
    refuse(["convert", str(model), str(notes)], "exists; choose another destination.\n", capsys)
    refuse(["convert", str(model), str(notes), "--overwrite"], "is no model folder", capsys)
    refuse(["convert", str(model), str(notes / "thesis.txt"), "--overwrite"],
           "is no model folder", capsys)
    refuse(["convert", str(model), str(model.parent), "--overwrite"], "holds the source", capsys)
    assert (notes / "thesis.txt").read_text() == "years of work" and model.is_dir()
    assert main(["convert", str(model), str(out)]) == 0
    capsys.readouterr()
    refuse(["convert", str(model), str(out)], "or replace it with --overwrite.", capsys)
    assert main(["convert", str(model), str(out), "--overwrite", "--dtype", "float16"]) == 0
    assert load_file(out / "model.safetensors")["model.norm.weight"].dtype == torch.float16


def test_a_cut_file_is_one_error_and_leaves_nothing(model: Path, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refuse(["convert", str(model), str(tmp_path / "out")], "cut", capsys)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(("text", "nbytes"), [
    ("5GB", 5 * 10**9), ("1.5 GiB", 3 * 2**29), ("1000", 1000), ("500mb", 5 * 10**8)])
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", "0", "0.1", "1e9", "nan"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        parse_size(text)
