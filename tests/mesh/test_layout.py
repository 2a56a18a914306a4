"""Ranks and their groups: properties of every layout, and Megatron-LM's published examples."""

from __future__ import annotations

import itertools
import math
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.mesh.layout import AXES, Layout, divisors
from kilter.models.spec import LayerSpec, ModelSpec, RopeSpec

DENSE = ("pp", "replicate", "shard", "cp", "tp")
EXPERT = ("pp", "ereplicate", "eshard", "ep", "etp")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degree = st.integers(1, 4)
    pp, cp, tp, replicate, shard = (draw(degree) for _ in range(5))
    zero = draw(st.integers(0, 3))
    dp = replicate * shard
    ep = draw(st.sampled_from(divisors(dp * cp * tp)))
    etp = draw(st.sampled_from(divisors(dp * cp * tp // ep)))
    edp = dp * cp * tp // (ep * etp)
    if zero == 0:
        replicate = 0
    elif edp % replicate:
        replicate = math.gcd(edp, replicate)
    order = tuple(draw(st.permutations(["tp", "cp", "dp", "pp"])))
    return Layout(pp=pp, dp=dp, replicate=replicate, zero=zero, cp=cp, tp=tp, ep=ep, etp=etp,
                  order=order)


def combinations(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [c for n in range(1, len(names) + 1) for c in itertools.combinations(names, n)]


@given(layouts(), st.sampled_from([*combinations(DENSE), *combinations(EXPERT), ("dp",), ("edp",),
                                   ("dp", "cp"), ("edp", "pp")]))
def test_groups_of_any_axes_partition_the_world(layout: Layout, axes: tuple[str, ...]) -> None:
    groups = layout.groups(axes)
    assert sorted(itertools.chain(*groups)) == list(range(layout.world))
    assert {len(group) for group in groups} == {layout.size(axes)}
    assert all(group == sorted(group) for group in groups) and groups == sorted(groups)


@given(layouts(), st.sampled_from(AXES))
def test_an_axis_orders_its_groups(layout: Layout, axis: str) -> None:
    """A rank's index in its group is its coordinate, and the rest of the view stays."""
    view = EXPERT if axis.startswith("e") else DENSE
    halves = {"dp": {"shard", "replicate"}, "edp": {"eshard", "ereplicate"}}.get(axis, {axis})
    for group in layout.groups(axis):
        at = [layout.coordinates(rank) for rank in group]
        assert [a[axis] for a in at] == list(range(layout.size(axis)))
        assert len({tuple(a[name] for name in view if name not in halves) for a in at}) == 1


@given(layouts())
def test_coordinates_and_rank_of_are_inverse(layout: Layout) -> None:
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        assert layout.rank_of(at) == rank
        for names in (DENSE, EXPERT, ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")):
            assert layout.rank_of({name: at[name] for name in names}) == rank


@given(layouts())
def test_an_experts_group_lies_in_one_stage(layout: Layout) -> None:
    stage = {rank: layout.coordinates(rank)["pp"] for rank in range(layout.world)}
    for group in layout.groups(("ep", "etp", "edp")):
        assert len({stage[rank] for rank in group}) == 1
    assert layout.groups(("ep", "etp", "edp")) == layout.groups(("dp", "cp", "tp"))


@given(layouts())
def test_sizes(layout: Layout) -> None:
    assert layout.world == layout.pp * layout.edp * layout.ep * layout.etp
    assert layout.dp == layout.replicate * layout.shard
    assert layout.edp == layout.ereplicate * layout.eshard
    assert layout.size(DENSE) == layout.size(EXPERT) == layout.world
    assert layout.zero or (layout.shard, layout.eshard) == (1, 1)
    layout.check(layout.world)


def test_megatrons_example_of_sixteen_ranks() -> None:
    """The groups listed in the docstring of `initialize_model_parallel`."""
    layout = Layout(dp=2, tp=2, pp=4)
    assert layout.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14],
                                   [13, 15]]
    assert layout.groups("tp") == [[i, i + 1] for i in range(0, 16, 2)]
    assert layout.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_megatrons_other_order() -> None:
    """tp-pp-dp as `generate_masked_orthogonal_rank_groups` defines it, tp 2, pp 3, dp 4:
    rank = tp + 2 pp + 6 dp."""
    layout = Layout(tp=2, pp=3, dp=4, order=("tp", "cp", "pp", "dp"))
    assert layout.groups("dp") == [[i, i + 6, i + 12, i + 18] for i in range(6)]
    assert layout.groups("pp") == [[6 * d + t + i for i in (0, 2, 4)]
                                   for d in range(4) for t in range(2)]
    assert layout.groups(("tp", "dp"))[0] == [0, 1, 6, 7, 12, 13, 18, 19]


def test_megatrons_expert_groups() -> None:
    """Order tp-cp-ep-dp-pp: the expert view's strides are etp, then ep, then edp, then pp."""
    layout = Layout(tp=2, dp=4, pp=2, ep=4)
    assert layout.groups("ep")[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert layout.groups("edp")[:2] == [[0, 4], [1, 5]]
    layout = Layout(tp=2, dp=4, pp=2, ep=2, etp=2)
    assert layout.groups("etp")[0] == [0, 1]
    assert layout.groups("ep")[:2] == [[0, 2], [1, 3]]
    assert layout.groups("edp")[:2] == [[0, 4], [1, 5]]


def test_hybrid_sharding_keeps_a_copy_on_neighbours() -> None:
    layout = Layout(dp=4, replicate=2, zero=3, cp=2)
    assert layout.groups(("shard", "cp")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.groups("replicate") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_defaults_follow_from_the_degrees() -> None:
    assert Layout(dp=4).replicate == 4 and Layout(dp=4).shard == 1
    assert Layout(dp=4, zero=1).replicate == 1 and Layout(dp=4, zero=1).shard == 4
    assert Layout(tp=2).sequence_parallel is True and Layout().sequence_parallel is False
    assert Layout(tp=2, sequence_parallel=False).sequence_parallel is False
    assert str(Layout(pp=2, dp=4, replicate=2, zero=3, tp=2, ep=2)) == (
        "pp 2 · dp 4 · cp 1 · tp 2 (edp 4 · ep 2 · etp 1), ZeRO-3 over 2 in 2 copies")
    with pytest.raises(FrozenInstanceError):
        Layout().dp = 2  # type: ignore[misc]


@pytest.mark.parametrize(("degrees", "sentence"), [
    ({"dp": 0, "tp": -2, "zero": 4, "order": ("tp", "dp", "pp")},
     r"dp is 0.*; tp is -2.*; zero is 4.*; order is tp-dp-pp"),
    ({"dp": 6, "replicate": 4, "zero": 3},
     "replicate 4 does not divide dp 6; it may be 1, 2, 3 or 6"),
    ({"dp": 6, "replicate": 2}, "set zero to 1, 2 or 3 to shard them over 3 ranks"),
    ({"dp": 3, "ep": 2}, r"ep 2 · etp 1 = 2 does not divide the 3 ranks .* ep may be 1 or 3"),
    ({"dp": 3, "etp": 2}, r"does not divide the 3 ranks .* etp must be one of 1 or 3"),
    ({"overlap_tp": True, "dp": 2}, "overlap_tp is set, but tp is 1, so there is nothing to"),
    ({"overlap_tp": True, "tp": 4, "sequence_parallel": False},
     "without sequence_parallel the 4 ranks hold all rows"),
    ({"dp": 4, "replicate": 4, "zero": 1, "ep": 2},
     r"replicate 4 does not divide edp 2 .* replicate may be 1 or 2"),
])
def test_degrees_that_make_no_layout(degrees: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Layout(**degrees)


def test_a_layout_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(ValueError, match=r"= 12 ranks, but there are 8: .*dp 4 fits"):
        Layout(dp=6, tp=2).check(8)
    with pytest.raises(ValueError, match=r"pp · cp · tp = 3 must be one of 1, 2, 4 or 8"):
        Layout(dp=2, tp=3).check(8)
    spec = ModelSpec("LlamaForCausalLM", vocab_size=64, hidden_size=72, ffn_size=96, num_heads=9,
                     num_kv_heads=3, head_dim=8, layers=(LayerSpec(RopeSpec()),) * 2,
                     max_positions=64)
    for tp in (1, 2, 3):
        Layout(tp=tp, pp=2).check(2 * tp, spec)
    with pytest.raises(ValueError, match=(
            r"there are 8: .*; pp 5 asks for more stages than the model's 2 layers; tp 7 is more "
            r"than the 3 parts .* \(9 heads, 3 KV heads, feed-forward width 96\); tp may be at "
            r"most 3\.")):
        Layout(pp=5, tp=7).check(8, spec)


def test_coordinates_that_do_not_exist() -> None:
    layout = Layout(dp=2, tp=2, ep=2)
    with pytest.raises(ValueError, match="no rank 4 in a layout of 4"):
        layout.coordinates(4)
    with pytest.raises(ValueError, match="tp is 2, but that axis has 2 places"):
        layout.rank_of({"tp": 2})
    with pytest.raises(ValueError, match="no axis 'sp'"):
        layout.groups("sp")
    with pytest.raises(ValueError, match="different views"):
        layout.groups(("tp", "ep"))
