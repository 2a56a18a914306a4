"""The optimizers, on what each rank holds of the parameters.

AdamW (arXiv 1711.05101) is elementwise, so it works on any cut of a parameter. Muon is not, and has
a file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kilter.comm.axis import Axis
from kilter.parallel.data import Held
from kilter.train.muon import ADJUSTMENTS, Adjustment, Muon, takes

OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True)
class OptimizerConfig:
    """What steps the parameters.

    Attributes:
        name: ``adamw``; or ``muon`` for the matrices of the layers and AdamW for all else.
        lr: peak learning rate; of Muon's matrices ``muon_lr``.
        betas, eps: AdamW's.
        weight_decay: decoupled, on matrices; norms and biases have none.
        muon_momentum: with Nesterov's correction.
        muon_adjust_lr: how a matrix's rate follows from its shape, see `kilter.train.muon`.
        offload: keep the optimizer's states in the host's memory and step there.
    """

    name: OptimizerName = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_adjust_lr: Adjustment = "original"
    offload: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        problems = []
        if self.name not in ("adamw", "muon"):
            problems.append(f"name is {self.name!r} but must be adamw or muon")
        if not 0.0 < self.eps < math.inf:
            problems.append(f"eps is {self.eps} but must be positive and finite")
        for name in ("lr", "muon_lr", "weight_decay"):
            if not 0.0 <= getattr(self, name) < math.inf:
                problems.append(f"{name} is {getattr(self, name)} but must be finite and not "
                                "negative")
        if len(self.betas) != 2 or not all(0.0 <= b < 1.0 for b in self.betas):
            problems.append(f"betas are {list(self.betas)} but must be two numbers from 0 to 1")
        if not 0.0 <= self.muon_momentum < 1.0:
            problems.append(f"muon_momentum is {self.muon_momentum} but must be from 0 to 1")
        if self.muon_adjust_lr not in ADJUSTMENTS:
            problems.append(f"muon_adjust_lr is {self.muon_adjust_lr!r} but must be "
                            f"{' or '.join(ADJUSTMENTS)}")
        if self.name != "muon" and (unused := [
                name for name in ("muon_lr", "muon_momentum", "muon_adjust_lr")
                if getattr(self, name) != getattr(OptimizerConfig, name)]):
            problems.append(f"{' and '.join(unused)} set, but name is {self.name}; leave "
                            f"{'it' if len(unused) == 1 else 'them'} out, or set name to muon")
        if problems:
            raise ValueError(f"The optimizer cannot be so: {'; '.join(problems)}.")


class Optimizer:
    """Steps what a rank holds.

    Args:
        held: the parameters' local elements.
        holders: the ranks that together hold every parameter (Muon's meeting place); with Muon
            all of them make theirs together.
    """

    def __init__(self, held: Sequence[Held], config: OptimizerConfig, holders: Axis) -> None:
        self.config = config
        self._held = list(held)
        matrices = [h for h in held if config.name == "muon" and takes(h)]
        rest = [h for h in held if not (config.name == "muon" and takes(h))]
        self._host: dict[str, nn.Parameter] = {}
        if config.offload:
            self._host = {h.name: nn.Parameter(h.tensor.detach().to("cpu", copy=True))
                          for h in held}
        decayed = [self._stepped(h) for h in rest if len(h.shard.shape) > 1]
        plain = [self._stepped(h) for h in rest if len(h.shard.shape) == 1]
        groups = [{"params": params, "weight_decay": decay} for params, decay in
                  ((decayed, config.weight_decay), (plain, 0.0)) if params]
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps,
                                        fused=True) if groups else None
        self._muon = Muon(matrices, [self._stepped(h) for h in matrices], holders,
                          momentum=config.muon_momentum, weight_decay=config.weight_decay,
                          adjustment=config.muon_adjust_lr)

    def step(self, factor: float) -> None:
        """One step at ``factor`` times the peak learning rates."""
        for h in self._held:
            if h.name in self._host and h.tensor.grad is not None:
                self._host[h.name].grad = h.tensor.grad.to("cpu")
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = self.config.lr * factor
            self._adamw.step()
        self._muon.step(self.config.muon_lr * factor)
        with torch.no_grad():
            for h in self._held:
                if h.name in self._host:
                    h.tensor.copy_(self._host[h.name])
                    self._host[h.name].grad = None

    @torch.no_grad()
    def states(self) -> dict[str, dict[str, Tensor]]:
        """The state tensors of every parameter by name: those of its elements' shape, and ``step``
        (a scalar). Made where they are not there yet, so that a checkpoint can be read into them;
        the tensors are the optimizer's own."""
        found: dict[str, dict[str, Tensor]] = {}
        for h in self._held:
            tensor = self._stepped(h)
            if tensor in self._muon.momentum:
                found[h.name] = {"momentum": self._muon.momentum[tensor]}
                continue
            assert self._adamw is not None
            state: dict[str, Any] = self._adamw.state[tensor]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                state["exp_avg"] = torch.zeros_like(tensor)
                state["exp_avg_sq"] = torch.zeros_like(tensor)
            found[h.name] = dict(state)
        return found

    def reloaded(self) -> None:
        """To be called after the held tensors were changed from outside (a checkpoint)."""
        with torch.no_grad():
            for h in self._held:
                if h.name in self._host:
                    self._host[h.name].copy_(h.tensor)

    def _stepped(self, h: Held) -> nn.Parameter:
        return self._host.get(h.name, h.tensor)
