"""Ray: the connection, what the cluster has, and what is reserved of it for a job."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kilter.rl.config import RLJob
from kilter.train.inputs import device_type

_NO_CLUSTER = ("RAY_ADDRESS is {}, but no cluster answers there ({}). Start one with `ray start "
               "--head`, or unset RAY_ADDRESS to run on this machine alone.")


def load_ray() -> Any:
    """The package.

    Raises:
        ValueError: if it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("placement.ray is true, but the package ray is not installed; "
                         "pip install 'kilter[ray]', or set placement.ray = false.") from None
    return ray


@contextmanager
def connected() -> Iterator[Any]:
    """Ray, connected to the cluster at RAY_ADDRESS, or to one on this machine that ends with this;
    or as it is, where somebody has connected already.

    Raises:
        ValueError: if there is no cluster at RAY_ADDRESS.
    """
    ray = load_ray()
    if ray.is_initialized():
        yield ray
        return
    # Ray reports its use to its makers unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _check_address(address)
    try:
        ray.init(address="auto" if address else None, log_to_driver=False, logging_level="ERROR",
                 **({} if address else {"include_dashboard": False}))
    except ConnectionError as error:
        raise ValueError(_NO_CLUSTER.format(address, error)) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Ray itself would try for minutes."""
    if "://" in address:
        raise ValueError(f"RAY_ADDRESS is {address}, but the command has to be started on a "
                         "machine of the cluster; do that, with the address host:port.")
    host, colon, port = address.rpartition(":")
    if not colon:
        return  # "auto", say
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10.0):
            pass
    except (OSError, ValueError) as error:
        raise ValueError(_NO_CLUSTER.format(address, error)) from None


def device_of(job: RLJob) -> str:
    """``cpu`` or ``cuda``: with "auto", cuda where the cluster has a GPU for every rank."""
    ranks = job.placement.world(job.layout.world)
    if job.launch.device == "auto":
        gpus = load_ray().cluster_resources().get("GPU", 0)
        return "cuda" if gpus >= ranks else "cpu"
    return job.launch.device if job.launch.device == "cuda" else device_type(job.launch)


@dataclass(frozen=True)
class Reserved:
    """Placement groups of a job.

    Attributes:
        trainer: a bundle for each rank of the trainer's world.
        replicas: one for each rollout replica that is apart, with a bundle for each of its ranks.
        cpus, gpus: of a bundle.
    """

    trainer: Any
    replicas: tuple[Any, ...]
    cpus: float
    gpus: int

    def actor(self, kind: type, group: Any, index: int) -> Any:
        """A class as an actor in a bundle; call ``remote`` with the constructor's arguments."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return load_ray().remote(kind).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_concurrency=8,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index))


@contextmanager
def reserved(job: RLJob, device: str) -> Iterator[Reserved]:
    """Room for all ranks: the trainer's close together, and each replica's.

    Raises:
        ValueError: if the cluster does not have that much, or others do not give it free in
            ``launch.timeout`` seconds.
    """
    ray = load_ray()
    from ray.util.placement_group import placement_group, remove_placement_group

    placement, tp = job.placement, job.rollout.tp
    ranks = placement.world(job.layout.world)
    gpus = int(device == "cuda")
    bundle = {"CPU": placement.cpus, **({"GPU": 1} if gpus else {})}
    there = ray.cluster_resources()
    short = [f"{ranks * amount:g} {kind}s, but the cluster has {there.get(kind, 0):g}"
             for kind, amount in bundle.items() if ranks * amount > there.get(kind, 0) + 1e-6]
    if short:
        raise ValueError(f"The job has {ranks} ranks and so needs {' and '.join(short)}. Add "
                         "machines with `ray start --address=…`, or make the layout, placement or "
                         "placement.cpus smaller.")
    replicas = placement.rollout // tp if placement.apart else 0
    groups = [placement_group([bundle] * size, strategy="PACK")
              for size in [placement.inside(job.layout.world)] + [tp] * replicas]
    try:
        if not all(group.wait(job.launch.timeout) for group in groups):
            raise ValueError(f"The cluster did not have room for {ranks} ranks within "
                             f"{job.launch.timeout:g} s (launch.timeout), since others use it; "
                             "`ray status` tells who. Try again when there is room.")
        yield Reserved(groups[0], tuple(groups[1:]), placement.cpus, gpus)
    finally:
        for group in groups:
            remove_placement_group(group)
