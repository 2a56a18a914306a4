"""Checkpoints of tensors cut in any way: whole or absent, and read by anybody."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.comm.axis import Axis
from kilter.mesh import Layout, Mesh
from kilter.parallel.shards import Box, Shard
from kilter.train.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    Pieces,
    checkpoints,
    load_tensors,
    read_facts,
)
from tests.ranks import RankPool

ALONE = Axis("world", (0,), 0)
KEEP_ALL = CheckpointConfig(keep=0, asynchronous=False)


def whole(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


def save(folder: Path, step: int = 1, config: CheckpointConfig = KEEP_ALL) -> Checkpointer:
    checkpointer = Checkpointer(folder, config, ALONE)
    checkpointer.save(step, {"w": Pieces(whole(6, 4), Shard.whole((6, 4)))}, {"note": "x"})
    checkpointer.wait()
    return checkpointer


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, int], list[int], int]:
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    marks = sorted(draw(st.sets(st.integers(1, rows), max_size=4)) | {0, rows})
    return (rows, columns), marks, draw(st.integers(0, columns))


@settings(deadline=None, max_examples=15)
@given(cuts(), cuts())
def test_any_boxes_are_read_from_any_boxes(one: tuple[tuple[int, int], list[int], int],
                                           other: tuple[tuple[int, int], list[int], int]) -> None:
    """Written as runs of rows in one order, read as runs of columns' halves."""
    shape, marks, _ = one
    boxes = [Box((a, 0), (b - a, shape[1]))
             for a, b in pairwise(marks)][::-1]
    shard = Shard(shape, tuple(boxes), (True,) * len(boxes))
    data = whole(*shape)
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(Path(folder), KEEP_ALL, ALONE)
        checkpointer.save(1, {"w": Pieces(torch.cat([data[b.slices] for b in boxes]), shard)}, {})
        checkpointer.close()
        split = min(other[2], shape[1])
        for start, size in ((0, split), (split, shape[1] - split)):
            part = Shard(shape, (Box((0, start), (shape[0], size)),), (True,))
            found = torch.full((shape[0], size), torch.nan)
            load_tensors(Path(folder) / "step-00000001", {"w": Pieces(found, part)}, ALONE)
            assert torch.equal(found, data[:, start:start + size])


def test_facts_and_the_order_of_steps(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step).close()
    assert [path.name for path in checkpoints(tmp_path)] == [
        "step-00000009", "step-00000010", "step-00000100"]
    assert read_facts(tmp_path / "step-00000010") == {"step": 10, "note": "x"}


def test_a_half_written_one_is_none(tmp_path: Path) -> None:
    save(tmp_path, 1).close()
    (tmp_path / "step-00000002").mkdir()  # no metadata: not complete, whoever made it
    (tmp_path / "step-00000003.partial").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]
    save(tmp_path, 4).close()
    assert not (tmp_path / "step-00000003.partial").exists()


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, CheckpointConfig(keep=2)).close()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004", "step-00000005"]


def test_asynchronous_saves_the_moment_of_the_call(tmp_path: Path) -> None:
    data = whole(6, 4)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(), ALONE)
    checkpointer.save(1, {"w": Pieces(data, Shard.whole((6, 4)))}, {})
    data.zero_()
    checkpointer.close()
    load_tensors(tmp_path / "step-00000001", {"w": Pieces(data, Shard.whole((6, 4)))}, ALONE)
    assert torch.equal(data, whole(6, 4))


def test_a_failed_write_is_told_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", CheckpointConfig(), ALONE)
    (tmp_path / "c").rmdir()
    (tmp_path / "c").write_text("in the way")
    checkpointer.save(1, {"w": Pieces(whole(2, 2), Shard.whole((2, 2)))}, {})
    with pytest.raises(OSError, match="c"):
        checkpointer.wait()
    checkpointer.close()


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    save(tmp_path).close()
    with pytest.raises(CheckpointError) as error:
        load_tensors(tmp_path / "step-00000001", {
            "w": Pieces(whole(2, 4), Shard.whole((2, 4))),
            "v": Pieces(whole(1, 1), Shard.whole((1, 1)))}, ALONE)
    assert "w has shape [6, 4] there and [2, 4] here" in str(error.value)
    assert "v is not in it" in str(error.value)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        read_facts(tmp_path)


def owned_once(folder: str) -> int:
    """Two ranks hold all of a tensor, the first owns it: bytes that this rank wrote."""
    world = Mesh(Layout(dp=2)).axis("world")
    checkpointer = Checkpointer(Path(folder), KEEP_ALL, world)
    shard = Shard.whole((64, 64), owned=world.index == 0)
    checkpointer.save(1, {"w": Pieces(whole(64, 64), shard)}, {})
    checkpointer.close()
    found = torch.zeros(64, 64)
    load_tensors(Path(folder) / "step-00000001", {"w": Pieces(found, shard)}, world)
    assert torch.equal(found, whole(64, 64))
    return sum(path.stat().st_size for path in
               Path(folder).glob(f"step-00000001/__{world.index}_*.distcp"))


def test_what_ranks_hold_in_common_is_written_once(tmp_path: Path, ranks: RankPool) -> None:
    first, second = ranks.run(2, owned_once, str(tmp_path))
    assert first >= 64 * 64 * 4 and second == 0
