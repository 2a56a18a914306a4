"""Objects over an axis: what one rank makes or raises is there, or raised, on all of them."""

from __future__ import annotations

import pytest

from kilter.comm.axis import Axis
from kilter.comm.objects import gather_objects, raise_first, share_result
from kilter.mesh import Layout, Mesh
from tests.ranks import RankPool

SINGLE = Axis("tp", (0,), 0)


def fail() -> int:
    raise ValueError("no result")


def check_objects() -> None:
    axis = Mesh(Layout(tp=3)).axis("tp")
    me = axis.index
    assert gather_objects({"rank": me}, axis) == [{"rank": rank} for rank in range(3)]
    # The source's result counts, also where others have one.
    assert share_result((lambda: me) if me else None, axis, source=1) == 1
    with pytest.raises(ValueError, match="no result"):
        share_result(fail if me == 2 else None, axis, source=2)
    raise_first(None, axis)
    with pytest.raises(ValueError, match="of rank 1"):
        raise_first(ValueError(f"of rank {me}") if me else None, axis)


def test_all_ranks_have_the_same(ranks: RankPool) -> None:
    ranks.run(3, check_objects)


def test_one_rank_has_its_own() -> None:
    assert gather_objects("x", SINGLE) == ["x"]
    assert share_result(lambda: 7, SINGLE) == 7
    with pytest.raises(ValueError, match="no result"):
        share_result(fail, SINGLE)
    raise_first(None, SINGLE)


def test_what_is_not_named_is_raised_where_it_is() -> None:
    """Others are not told: they fail as this rank leaves."""
    told = Axis("tp", (0, 1), 0)  # without a group: telling would be another error
    with pytest.raises(ValueError, match="no result"):
        share_result(fail, told, raises=(KeyError,))
    with pytest.raises(ValueError, match="has one rank and so no process group"):
        share_result(fail, told, raises=(ValueError,))
