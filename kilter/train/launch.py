"""`kilter train` as a program for `kilter.train.elastic`."""

from __future__ import annotations

import sys
from datetime import timedelta

from kilter.mesh.mesh import Mesh
from kilter.train import elastic
from kilter.train.config import TrainJob
from kilter.train.elastic import Exit, Program
from kilter.train.inputs import Inputs, open_inputs
from kilter.train.loop import last_checkpoint, train


def run(job: TrainJob) -> Exit:
    """Trains, in this process or in as many as the layout asks for.

    Raises:
        ValueError: for a job that cannot be run, before anything was started.
    """
    return elastic.run(TRAIN, job)


def _open(job: TrainJob) -> Inputs:
    inputs = open_inputs(job)
    last_checkpoint(job)  # refuses another job's
    return inputs


def _work(job: TrainJob, inputs: Inputs, device: str, timeout: timedelta | None) -> str:
    mesh = Mesh(job.layout, device, alone=timeout is None, timeout=timeout)
    return train(job, inputs, mesh).text


TRAIN = Program("kilter.train.launch", TrainJob, lambda job: job.layout.world, _open, _work)

if __name__ == "__main__":
    elastic.main(TRAIN, *sys.argv[1:])
