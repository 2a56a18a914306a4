"""Checkpoints of tensors cut in any way: whole or absent, and read by anybody."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.comm.axis import Axis
from kilter.mesh import Layout, Mesh
from kilter.parallel.shards import Box, Shard
from kilter.train.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    checkpoints,
    load_tensors,
    read_facts,
)
from kilter.train.pieces import Pieces
from tests.ranks import RankError, RankPool

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
    assert read_facts(tmp_path / "step-00000010") == {
        "format": 1, "step": 10, "note": "x"}


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
    with pytest.raises(CheckpointError, match=r"Not a directory.* there was none before it"):
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
    with pytest.raises(CheckpointError, match="damaged or no checkpoint"):
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


# ---- disks and processes that fail

@contextmanager
def no_file_above(nbytes: int) -> Iterator[None]:
    """The kernel lets no file of this process grow further, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_for(folder: str, full: int) -> list[str]:
    """The disk of one of the ranks is full at step 2: what this one is told, then what is there."""
    mesh = Mesh(Layout(dp=2)) if torch.distributed.is_initialized() else None
    world = ALONE if mesh is None else mesh.axis("world")
    checkpointer = Checkpointer(Path(folder), CheckpointConfig(keep=1), world)
    rows = 64 * world.size
    mine = Box((64 * world.index, 0), (64, 512))
    pieces = {"w": Pieces(whole(64, 512), Shard((rows, 512), (mine,), (True,)))}
    checkpointer.save(1, pieces, {})
    checkpointer.wait()
    with no_file_above(1 << 16 if world.index == full else resource.RLIM_INFINITY):
        checkpointer.save(2, pieces, {})
        with pytest.raises(CheckpointError) as error:
            checkpointer.wait()
    there = sorted(path.name for path in Path(folder).iterdir())
    if mesh is not None:
        torch.distributed.barrier()  # all have looked
    checkpointer.save(3, pieces, {})  # there is room again
    checkpointer.close()
    return [str(error.value), *there]


def test_a_full_disk_leaves_the_last_whole_one(tmp_path: Path, ranks: RankPool) -> None:
    alone = full_for(str(tmp_path / "alone"), 0)
    said = f"step 2 could not be written to {tmp_path / 'alone'} (rank 0: File too large"
    assert said in alone[0] and "goes on from step-00000001, which is whole" in alone[0]
    both = ranks.run(2, full_for, str(tmp_path / "both"), 1)
    assert both[0] == both[1] and "(rank 1: File too large" in both[0][0]
    for folder, told in ((tmp_path / "alone", alone), (tmp_path / "both", both[0])):
        assert told[1:] == ["step-00000001"]
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]


def die_at(folder: str, point: str) -> None:
    """Killed while the third checkpoint is written, of which one is kept."""
    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half(path: Path, **_: Any) -> None:
        if path.exists():
            next(path.glob("*.distcp")).unlink()
            die()

    for step in (1, 2):
        save(Path(folder), step, CheckpointConfig(keep=1)).close()
    if point == "written":
        dcp.FileSystemWriter.finish = die  # type: ignore[method-assign]
    elif point == "renamed":
        os.replace = die
    elif point == "removed":
        shutil.rmtree = half  # type: ignore[assignment]
    save(Path(folder), 3, CheckpointConfig(keep=1))


@pytest.mark.parametrize(("point", "last"), [("written", 2), ("renamed", 2), ("removed", 3)])
def test_a_killed_run_leaves_whole_ones_only(tmp_path: Path, ranks: RankPool, point: str, last: int
                                             ) -> None:
    with pytest.raises(RankError, match="SIGKILL"):
        ranks.run(1, die_at, str(tmp_path), point)
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{last:08d}"]
    save(tmp_path, 4).close()  # the folder is free again
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{last:08d}", "step-00000004"]
    found = torch.zeros(6, 4)
    load_tensors(tmp_path / f"step-{last:08d}", {"w": Pieces(found, Shard.whole((6, 4)))}, ALONE)
    assert torch.equal(found, whole(6, 4))


def second_run(folder: str) -> str:
    with pytest.raises(CheckpointError) as error:
        Checkpointer(Path(folder), KEEP_ALL, Mesh(Layout(dp=2)).axis("world"))
    return str(error.value)


def test_a_folder_has_one_run(tmp_path: Path, ranks: RankPool) -> None:
    first = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="Another run is writing to"):
        save(tmp_path, 2)
    assert all("name another output folder" in said
               for said in ranks.run(2, second_run, str(tmp_path)))
    first.save(2, {"w": Pieces(whole(6, 4), Shard.whole((6, 4)))}, {})
    first.close()
    save(tmp_path, 3).close()
    assert len(checkpoints(tmp_path)) == 3


def on_own_disks(folder: str) -> str:
    world = Mesh(Layout(dp=2)).axis("world")
    with pytest.raises(CheckpointError) as error:
        Checkpointer(Path(folder) / str(world.index), KEEP_ALL, world)
    return str(error.value)


def test_machines_that_do_not_share_the_folder(tmp_path: Path, ranks: RankPool) -> None:
    """Else every checkpoint would lack what the other machine wrote."""
    said = ranks.run(2, on_own_disks, str(tmp_path))
    assert all(f"writes to {tmp_path}" in one and "is not there for rank 1." in one for one in said)
    assert list((tmp_path / "0").iterdir()) == []
    Checkpointer(tmp_path / "0", KEEP_ALL, ALONE).close()  # not locked


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file.*: Not a directory"):
        save(tmp_path / "file" / "checkpoints")


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def change(name: str, how: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        (path,) = folder.glob(name)
        path.write_bytes(how(path.read_bytes()))

    return damage


def one_bit(data: bytes) -> bytes:
    at = data.index(whole(6, 4).numpy().tobytes()) + 17
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1:]


def other_format(data: bytes) -> bytes:
    return json.dumps(json.loads(data) | {"format": 0}).encode()


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (change("*.distcp", lambda data: data[:len(data) // 2]), "not a zip file"),
    "one bit": (change("*.distcp", one_bit), "__0_0.distcp holds other bits than were written"),
    "gone": (lambda folder: next(folder.glob("*.distcp")).unlink(), "No such file.*__0_0.distcp"),
    "index cut": (change(".metadata", lambda data: data[:-9]), "truncated"),
    "index empty": (change(".metadata", lambda _: b""), ".metadata: "),
    "index of another kind": (change(".metadata", lambda _: pickle.dumps([1])), "holds a list"),
    "index that runs": (change(".metadata", lambda _: pickle.dumps(Runs())), "asks for .*mkdir"),
    "facts cut": (change("trainer.json", lambda data: data[:9]), "cannot be read"),
    "facts of nothing": (change("trainer.json", lambda _: b"{}"), "says no step"),
    "other format": (change("trainer.json", other_format), "in the format 0; this version reads"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_one_is_told_with_what_to_do(name: str, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        save(tmp_path, step).close()
    damage, message = DAMAGES[name]
    damage(tmp_path / "step-00000002")
    found = torch.zeros(6, 4)

    def read(step: int) -> None:
        assert read_facts(tmp_path / f"step-{step:08d}")["step"] == step
        load_tensors(tmp_path / f"step-{step:08d}", {"w": Pieces(found, Shard.whole((6, 4)))},
                     ALONE)

    with pytest.raises(CheckpointError, match=message) as error:
        read(2)
    assert str(tmp_path / "step-00000002") in str(error.value)
    assert "another output folder" in str(error.value) or (
        "remove it: the same command then goes on from step-00000001." in str(error.value))
    assert not (tmp_path / "ran").exists()
    read(1)
    assert torch.equal(found, whole(6, 4))


def test_an_element_that_nobody_wrote_is_missed(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, KEEP_ALL, ALONE)
    part = Shard((6, 4), (Box((0, 0), (5, 4)),), (True,))
    checkpointer.save(1, {"w": Pieces(whole(5, 4), part)}, {})
    checkpointer.close()
    load_tensors(tmp_path / "step-00000001", {"w": Pieces(whole(5, 4), part)}, ALONE)
    with pytest.raises(CheckpointError, match="w is not whole in it"):
        load_tensors(tmp_path / "step-00000001",
                     {"w": Pieces(whole(6, 4), Shard.whole((6, 4)))}, ALONE)
