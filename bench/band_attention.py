"""Band attention beside `kilter.ops.attention` on the same causal packs.

    python -m bench.band_attention [--repeats 7] [--threads 1]

Both take turns; a figure is the median over the turns of band attention's processor seconds over
attention's, for the forward and the backward pass, below 1 where the bands are faster; backward
both run one kernel. The last line is a ring step, in which every row sees every key: its time per
(query, key) pair over that of causal attention. Prints, and writes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kilter.ops.attention import attention
from kilter.ops.band_attention import (
    NO_HIGH,
    NO_LOW,
    Bands,
    band_attention,
    band_attention_grad,
)
from kilter.ops.cpu.library import set_num_threads

HEADS, GROUPS, DIM = 9, 3, 64  # SmolLM2 135M
PACKS: dict[str, tuple[list[int], int | None]] = {
    "one document of 2048": ([2048], None),
    "8 documents of 256": ([256] * 8, None),
    "64 documents of 32": ([32] * 64, None),
    "one of 2048, window 256": ([2048], 256),
}


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def ratios(repeats: int, ours: Callable[[], object], theirs: Callable[[], object]) -> float:
    """Median over the turns."""
    ours()
    theirs()
    return statistics.median(seconds(ours) / seconds(theirs) for _ in range(repeats))


def compare(repeats: int, lengths: list[int], window: int | None, bands: Bands
            ) -> tuple[float, float]:
    """(forward, backward)."""
    tokens = sum(lengths)
    q, k, v = (torch.randn(tokens, n, DIM) for n in (HEADS, GROUPS, GROUPS))
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = attention(*leaves, cu, scale=DIM ** -0.5, window=window)
    dout = torch.randn_like(q)
    out, lse = band_attention(q, k, v, bands, scale=DIM ** -0.5)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(whole, leaves, dout, retain_graph=True)

    return (ratios(repeats, lambda: band_attention(q, k, v, bands, scale=DIM ** -0.5),
                   lambda: attention(q, k, v, cu, scale=DIM ** -0.5, window=window)),
            ratios(repeats, lambda: band_attention_grad(dout, q, k, v, out, lse, bands,
                                                        scale=DIM ** -0.5), backward))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{'processor seconds of bands / attention':40} forward  backward")
    for name, (lengths, window) in PACKS.items():
        bands = Bands.causal(torch.tensor([0, *lengths]).cumsum(0), window or 0)
        forward, backward = compare(args.repeats, lengths, window, bands)
        print(f"{name:40} {forward:7.2f}  {backward:8.2f}")
    full = Bands(torch.tensor([[0, 2048, 0, 2048, NO_LOW, NO_HIGH]]))
    pairs = 2048 * 2048 / (2048 * 2049 / 2)
    forward, backward = (x / pairs for x in compare(args.repeats, [2048], None, full))
    print(f"{'a ring step of 2048, per pair':40} {forward:7.2f}  {backward:8.2f}")


if __name__ == "__main__":
    main()
