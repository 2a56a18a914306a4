"""Reward models of every family: transformers' classifiers with one label, there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from kilter.models.batch import Batch
from kilter.models.decoder import Decoder
from kilter.models.value import add_value_head
from kilter.weights.bridge import open_model
from kilter.weights.errors import WeightsError
from kilter.weights.export import State, export_hf
from tests.weights import tiny

TOKENS = [5, 7, 98, 3, 3, 41, 60, 2, 9, 11]


def classifier(name: str, labels: int, folder: Path) -> torch.nn.Module:
    torch.manual_seed(1)
    config = tiny.CONFIGS[name]()
    config.num_labels = labels
    model: torch.nn.Module = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.eval().save_pretrained(folder)  # type: ignore[operator]
    return model


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_classifier_is_read_and_written(name: str, tmp_path: Path) -> None:
    theirs = classifier(name, 1, tmp_path / "src")
    source = open_model(tmp_path / "src", reward=True)
    ours = add_value_head(Decoder(source.spec))
    with torch.no_grad():
        for path, parameter in ours.named_parameters():
            parameter.copy_(source.read(path))  # type: ignore[arg-type]
        expected = theirs(torch.tensor([TOKENS])).logits
        assert float(ours(Batch.of([TOKENS]))[-1]) == pytest.approx(float(expected), rel=1e-4)
    tensors = {path: p.detach() for path, p in ours.named_parameters()}
    for config in (source.config, None):
        export_hf(State(source.spec, tensors, None, config), tmp_path / "dst", overwrite=True)
        loaded, info = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "dst", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert float(loaded(torch.tensor([TOKENS])).logits.detach()) == pytest.approx(
            float(expected), rel=1e-5)
        for path, value in theirs.state_dict().items():
            assert torch.equal(loaded.state_dict()[path], value), path
        written = json.loads((tmp_path / "dst" / "config.json").read_text())
        assert written["architectures"] == [type(theirs).__name__]
        assert len(written["id2label"]) == 1


def test_more_labels_are_no_reward(tmp_path: Path) -> None:
    classifier(tiny.NAMES[0], 3, tmp_path)
    with pytest.raises(WeightsError, match=r"score.weight has shape \[3, 48\] but the config asks "
                                           r"for \[1, 48\]"):
        open_model(tmp_path, reward=True)
