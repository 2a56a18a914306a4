"""`CommCounter`: what a stretch of code sent, per mesh axis and collective.

    with CommCounter(mesh.axes()) as counter:
        step()
    counter.bytes("tp"), counter.calls("dp_shard_cp", "all_gather"), counter.traffic

Everything that reaches torch's collectives is seen: ours, FSDP2, DDP, pipelines, functional and
in-place ones, in forward and backward.

Bytes are those that one rank puts on the wire in a ring, rounded up to whole bytes per call, so
that they neither depend on the algorithm that a library picks nor differ between ranks:

    all_reduce           2 (n-1)/n · S    S: bytes of the tensor
    all_gather             (n-1)/n · S    S: bytes of the result
    reduce_scatter         (n-1)/n · S    S: bytes of the input
    all_to_all           what this rank gives to others
    broadcast, reduce      (n-1)/n · S    S: bytes of the tensor; the average over the ranks
    gather, scatter        (n-1)/n · S    S: bytes of one rank's part; the average over the ranks
    send                 S                and 0 for recv
    barrier              0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kilter.comm.axis import Axis

_RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "reduce": 1,
         "gather": 1, "scatter": 1}


def wire_bytes(op: str, payload: int, ranks: int) -> int:
    """Bytes per rank of one collective; the payload is S in the table above.

    Raises:
        ValueError: for an operation that is not in the table, and for all_to_all, which depends
            on who gets what.
    """
    if op in _RING:
        return -(-_RING[op] * (ranks - 1) * payload // ranks)
    if op == "send":
        return payload
    if op in ("recv", "barrier"):
        return 0
    raise ValueError(f"There is no closed form for the bytes of {op!r}.")


@dataclass
class Traffic:
    calls: int = 0
    bytes: int = 0


class CommCounter(TorchDispatchMode):
    """Counts while it is entered; it can be entered again and then goes on counting.

    Attributes:
        traffic: (axis, operation) -> `Traffic`. Groups that are no axis's are called by their
            ranks, the default group ``world``.
    """

    def __init__(self, axes: Iterable[Axis] = ()) -> None:
        super().__init__()
        self.traffic: dict[tuple[str, str], Traffic] = {}
        self._names = {axis.members.group_name: axis.name for axis in axes if axis.size > 1}

    def calls(self, axis: str | None = None, op: str | None = None) -> int:
        """Calls on this axis (all if None) of this operation (all if None)."""
        return sum(t.calls for t in self._matching(axis, op))

    def bytes(self, axis: str | None = None, op: str | None = None) -> int:
        """Bytes on this axis (all if None) of this operation (all if None)."""
        return sum(t.bytes for t in self._matching(axis, op))

    def _matching(self, axis: str | None, op: str | None) -> list[Traffic]:
        return [traffic for (a, o), traffic in self.traffic.items()
                if axis in (None, a) and op in (None, o)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _TABLES and func._opname not in _SILENT:
            names = [argument.name for argument in func._schema.arguments]
            self._count(_TABLES[func.namespace], func._opname,
                        dict(zip(names, args, strict=False)) | kwargs)
        return func(*args, **kwargs)

    def _count(self, table: dict[str, tuple[str, str]], name: str,
               arguments: dict[str, Any]) -> None:
        group = _group(arguments)
        ranks = group.size()
        if name == "batch_p2p_ops":
            for op, tensor in zip(arguments["op_list"], arguments["tensors"], strict=True):
                op = op.removeprefix("i")
                self._add(group, op, wire_bytes(op, tensor.nbytes, ranks))
        elif name in _ALL_TO_ALL:
            self._add(group, "all_to_all", _ALL_TO_ALL[name](arguments, group))
        elif name in table:
            op, argument = table[name]
            payload = _nbytes(arguments[argument])
            if op == "all_gather" and table is _FUNCTIONAL:
                payload *= ranks
            self._add(group, op, wire_bytes(op, payload, ranks))
        else:
            raise NotImplementedError(
                f"torch's collective {name} is not one that Kilter can count; add it to the table "
                "in kilter/comm/counter.py.")

    def _add(self, group: dist.ProcessGroup, op: str, sent: int) -> None:
        traffic = self.traffic.setdefault((self._name(group), op), Traffic())
        traffic.calls += 1
        traffic.bytes += sent

    def _name(self, group: dist.ProcessGroup) -> str:
        name = self._names.get(group.group_name)
        if name is None:
            ranks = dist.get_process_group_ranks(group)
            name = ("world" if len(ranks) == dist.get_world_size()
                    else "ranks " + ",".join(map(str, ranks)))
        return name


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    named = arguments["group_name"]
    if isinstance(named, str):
        return dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(named))
    return named if isinstance(named, dist.ProcessGroup) else dist.ProcessGroup.unbox(named)


def _nbytes(tensors: Any) -> int:
    """Of a tensor, or of all in a list, or list of lists."""
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(_nbytes(tensor) for tensor in tensors)


def _rows_to_others(arguments: dict[str, Any], group: dist.ProcessGroup) -> int:
    tensor, sizes = arguments["input"], arguments["input_split_sizes"]
    if not sizes:  # equal shares
        return tensor.nbytes - tensor.nbytes // group.size()
    rows = sum(sizes)
    return tensor.nbytes // rows * (rows - sizes[group.rank()]) if rows else 0


def _tensors_to_others(arguments: dict[str, Any], group: dist.ProcessGroup) -> int:
    tensors = arguments["input_tensors"]
    return _nbytes(tensors) - tensors[group.rank()].nbytes


# torch's operator -> (our name, the argument whose bytes are S). A functional all-gather is given
# no output, so there S is the input's bytes times the ranks.
_C10D = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "allgather_": ("all_gather", "output_tensors"),
    "allgather_coalesced_": ("all_gather", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
    "barrier": ("barrier", "tensor"),
}
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", "input"),
    "all_reduce_": ("all_reduce", "input"),
    "all_reduce_coalesced": ("all_reduce", "inputs"),
    "all_reduce_coalesced_": ("all_reduce", "inputs"),
    "all_gather_into_tensor": ("all_gather", "input"),
    "all_gather_into_tensor_out": ("all_gather", "input"),
    "all_gather_into_tensor_coalesced": ("all_gather", "inputs"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "broadcast": ("broadcast", "input"),
    "broadcast_": ("broadcast", "input"),
    "isend": ("send", "tensor"),
    "irecv": ("recv", "tensor"),
}
_TABLES = {"c10d": _C10D, "_c10d_functional": _FUNCTIONAL}
_ALL_TO_ALL = {"alltoall_base_": _rows_to_others, "all_to_all_single": _rows_to_others,
               "alltoall_": _tensors_to_others}
# These send nothing themselves.
_SILENT = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "monitored_barrier_"}
