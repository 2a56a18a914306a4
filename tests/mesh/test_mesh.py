"""A mesh's axes are the layout's groups, with process groups that reach exactly their ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from kilter.mesh import Layout, Mesh
from tests.ranks import RankPool

NAMES = ("pp", "dp", "replicate", "shard", "cp", "tp", "ep", "etp", "edp", "ereplicate", "eshard",
         "world", "dp_cp", "dp_shard_cp", "dp_shard", "tp_cp", "ep_etp", "pp_tp")
LAYOUTS = [
    Layout(pp=2, dp=2, tp=2, ep=2),
    Layout(dp=4, replicate=2, zero=3, cp=2, ep=4, order=("cp", "pp", "dp", "tp")),
]
PARTS = {"world": ("pp", "dp", "cp", "tp"), "dp_cp": ("dp", "cp"), "dp_shard_cp": ("shard", "cp"),
         "dp_shard": ("shard",), "tp_cp": ("tp", "cp"), "ep_etp": ("ep", "etp"),
         "pp_tp": ("pp", "tp")}


def check_axes(layout: Layout) -> None:
    mesh = Mesh(layout)
    for name in NAMES:
        axis = mesh.axis(name)
        assert mesh.axis(name) is axis and axis.name == name
        assert list(axis.ranks) in layout.groups(PARTS.get(name, (name,)))
        assert axis.size == len(axis.ranks) and axis.ranks[axis.index] == mesh.rank
        assert (axis.group is None) == (axis.size == 1)
        if axis.group is not None:
            total = torch.tensor([1 << mesh.rank])
            dist.all_reduce(total, group=axis.group)
            assert total.item() == sum(1 << rank for rank in axis.ranks)
    assert all(mesh.coordinates[name] == mesh.axis(name).index for name in mesh.coordinates)


def check_device_meshes() -> None:
    layout = Layout(dp=4, replicate=2, zero=3, cp=2, order=("dp", "cp", "tp", "pp"))
    mesh = Mesh(layout)
    flat = mesh.device_mesh("dp_shard_cp")
    assert flat.mesh.tolist() == list(mesh.axis("dp_shard_cp").ranks)
    square = mesh.device_mesh("replicate", "dp_shard_cp")
    assert square.mesh_dim_names == ("replicate", "dp_shard_cp")
    assert square.mesh.shape == (2, 4)
    for name in ("replicate", "dp_shard_cp"):
        assert square[name].get_local_rank() == mesh.axis(name).index
        assert square.get_group(name) is mesh.axis(name).group
    assert square.mesh[:, mesh.axis("dp_shard_cp").index].tolist() == list(
        mesh.axis("replicate").ranks)

    whole = torch.nn.Linear(8, 8)
    x = torch.randn(8, 4, 8)
    whole(x).square().sum().backward()
    for names in (("dp_shard_cp",), ("replicate", "dp_shard_cp"), ("tp",), ("dp_cp", "tp")):
        shard = torch.nn.Linear(8, 8)
        shard.load_state_dict(whole.state_dict())
        fully_shard(shard, mesh=mesh.device_mesh(*names))
        size = mesh.device_mesh(*names).mesh.numel()
        shard(x).square().sum().backward()
        weight = shard.weight.grad.full_tensor()
        assert torch.allclose(weight, whole.weight.grad, rtol=1e-6), (names, size)
    with pytest.raises(ValueError, match="overlap"):
        mesh.device_mesh("dp", "dp_shard_cp")


def check_refusals() -> None:
    with pytest.raises(ValueError, match="= 4 ranks, but there are 2"):
        Mesh(Layout(dp=4))
    single = Mesh.single()
    assert all(single.axis(name).size == 1 for name in NAMES) and single.axes() == []
    with pytest.raises(ValueError, match="no axis 'sp'"):
        single.axis("tp_sp")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_axes(ranks: RankPool, layout: Layout) -> None:
    ranks.run(layout.world, check_axes, layout)


def test_device_meshes_carry_fsdp(ranks: RankPool) -> None:
    ranks.run(8, check_device_meshes)


def test_worlds_that_do_not_fit(ranks: RankPool) -> None:
    ranks.run(2, check_refusals)


def test_one_process_needs_no_process_group() -> None:
    mesh = Mesh(Layout())
    assert mesh.rank == 0 and all(mesh.axis(name).group is None for name in NAMES)
    with pytest.raises(ValueError, match="has one rank and so no process group"):
        _ = mesh.axis("tp").members
    with pytest.raises(ValueError, match="initialised process group"):
        mesh.device_mesh("dp_shard_cp")
