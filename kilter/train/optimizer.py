"""The optimizers, on what each rank holds of the parameters.

AdamW (arXiv 1711.05101) is elementwise, so it works on any cut of a parameter. Muon
(github.com/KellerJordan/Muon) needs whole matrices: the pieces of one meet on one of the ranks that
hold it, each rank taking its turn, and the result goes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kilter.comm.axis import Axis
from kilter.parallel.data import Held
from kilter.parallel.load import fill

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
        offload: keep the optimizer's states in the host's memory and step there.
    """

    name: OptimizerName = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    offload: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        problems = []
        if self.name not in ("adamw", "muon"):
            problems.append(f"name is {self.name!r} but must be adamw or muon")
        if not self.eps > 0.0:
            problems.append(f"eps is {self.eps} but must be positive")
        for name in ("lr", "muon_lr"):
            if not getattr(self, name) >= 0.0:
                problems.append(f"{name} is {getattr(self, name)} but cannot be negative")
        if len(self.betas) != 2 or not all(0.0 <= b < 1.0 for b in self.betas):
            problems.append(f"betas are {list(self.betas)} but must be two numbers from 0 to 1")
        if self.weight_decay < 0.0:
            problems.append(f"weight_decay is {self.weight_decay} but cannot be negative")
        if not 0.0 <= self.muon_momentum < 1.0:
            problems.append(f"muon_momentum is {self.muon_momentum} but must be from 0 to 1")
        if problems:
            raise ValueError(f"The optimizer cannot be so: {'; '.join(problems)}.")


class Optimizer:
    """Steps what a rank holds.

    Args:
        held: the parameters' local elements.
        holders: the ranks that together hold every parameter (Muon's meeting place).
    """

    def __init__(self, held: Sequence[Held], config: OptimizerConfig, holders: Axis) -> None:
        self.config = config
        self._held = list(held)
        matrices = [h for h in held if _is_hidden_matrix(h)] if config.name == "muon" else []
        rest = [h for h in held if h not in matrices]
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
        self._muon = _Muon(matrices, [self._stepped(h) for h in matrices], config, holders)

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


class _Muon:
    def __init__(self, held: list[Held], stepped: list[nn.Parameter], config: OptimizerConfig,
                 holders: Axis) -> None:
        self._held, self._stepped = held, stepped
        self._config, self._axis = config, holders
        self.momentum = {p: torch.zeros_like(p) for p in stepped}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for i, (h, parameter) in enumerate(zip(self._held, self._stepped, strict=True)):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            momentum = self.momentum[parameter]
            momentum.lerp_(grad, 1.0 - self._config.muon_momentum)
            wanted = grad.lerp(momentum, self._config.muon_momentum)
            update = self._orthogonal(h, wanted, turn=i % self._axis.size)
            parameter.mul_(1.0 - lr * self._config.weight_decay)
            parameter.add_(update, alpha=-lr)

    def _orthogonal(self, h: Held, local: Tensor, turn: int) -> Tensor:
        """This rank's elements of the orthogonalised whole."""
        whole = local.new_zeros(h.shard.shape)
        for box, own, part in h.shard.parts(local):
            if own:
                whole[box.slices] = part
        if self._axis.size > 1:
            owner = self._axis.ranks[turn]
            dist.reduce(whole, owner, group=self._axis.members)
        if self._axis.index == turn:
            whole = orthogonalise(whole)
        if self._axis.size > 1:
            dist.broadcast(whole, owner, group=self._axis.members)
        out = torch.empty_like(local)
        fill(out, whole, h.shard)
        return out


def orthogonalise(matrix: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """About U V^T of a matrix's singular value decomposition, by five quintic Newton–Schulz
    steps, times sqrt(max(1, rows / columns))."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + eps)
    if tall := x.shape[0] > x.shape[1]:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x) * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5


def _is_hidden_matrix(h: Held) -> bool:
    return len(h.shard.shape) == 2 and h.name.startswith("layers.")
