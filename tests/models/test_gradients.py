"""The gradient of a whole decoder on the exact path, by every parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kilter.models import Batch, Decoder
from kilter.weights.bridge import open_model
from tests.models import tiny

LENGTHS = (45, 1, 18)


def gradients(model: Decoder, batch: Batch, targets: Tensor, counts: Tensor
              ) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    head = model.embed if model.head is None else model.head
    loss, _ = model.ops.head_loss(model.hidden(batch), head.weight, targets, counts, block=30)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


@pytest.mark.parametrize("name", ["llama-smollm2-like", "llama-linear-biases", "mistral-window",
                                  "qwen3-tied-mqa", "gemma3-plain"])
def test_gradients_are_those_of_torch_and_of_transformers(name: str, tmp_path: Path) -> None:
    oracle = tiny.make(name, tmp_path)
    source = open_model(tmp_path)
    models = [Decoder(source.spec, exact=exact) for exact in (True, False)]
    with torch.no_grad():
        for model in models:
            for key, parameter in model.named_parameters():
                parameter.copy_(source.read(key))
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(oracle.config.vocab_size, (n,), generator=generator).tolist()
             for n in LENGTHS]
    targets = torch.tensor([t for text in texts for t in [*text[1:], 0]])
    counts = torch.tensor([float(i + 1 < len(text)) for text in texts for i in range(len(text))])
    counts /= counts.sum()
    batch = Batch.of(texts)
    loss, exact = gradients(models[0], batch, targets, counts)
    stock_loss, stock = gradients(models[1], batch, targets, counts)
    assert exact.keys() == stock.keys() == {key for key, _ in models[0].named_parameters()}
    for key, grad in exact.items():
        assert (grad - stock[key]).norm() <= 1e-4 * stock[key].norm() + 1e-7, key
    again_loss, again = gradients(models[0], batch, targets, counts)
    assert again_loss == loss and all(torch.equal(exact[key], again[key]) for key in exact)

    total = torch.zeros(())
    for text in texts:
        if len(text) > 1:
            logprobs = oracle(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
            total = total - logprobs.gather(1, torch.tensor(text[1:])[:, None]).sum()
    total = total / sum(len(text) - 1 for text in texts)
    total.backward()
    assert abs(total.item() - loss) <= 1e-4 and abs(stock_loss - loss) <= 1e-4
    for ours, theirs in (("embed.weight", oracle.model.embed_tokens.weight),
                         ("norm.weight", oracle.model.norm.weight)):
        assert theirs.grad is not None
        assert (exact[ours] - theirs.grad).norm() <= 1e-4 * theirs.grad.norm()
