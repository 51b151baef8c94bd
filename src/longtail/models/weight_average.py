"""The exponential moving average of the weights of a network, which is deployed in place of the last weights.

    average <- d_t · average + (1 - d_t) · weights,    d_t = min(decay, (1 + t) / (10 + t))    in step t = 0, 1, …

The smaller decay of the first steps lets the average leave the initial weights soon. The running means and variances of batch
norm are averaged in the same way; integers, such as the number of batches, are not.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class WeightAverage:
    """The average of the parameters and buffers of a network. It begins with their present values.

    Args:
        net: The network. Its tensors must stay the same objects.
        decay: The largest decay; 0 for no average, with which all methods do nothing.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self.current = {k: v for k, v in net.state_dict().items() if v.is_floating_point()} if decay else {}
        self.averages = {name: tensor.clone() for name, tensor in self.current.items()}
        device = next((tensor.device for tensor in self.current.values()), None)
        self.rate = torch.zeros((), device=device)  # 1 - d_t, on the device: a captured step reads it

    def set_step(self, step: int) -> None:
        """Set the decay for a step, counted from 0."""
        self.rate.fill_(1 - min(self.decay, (1 + step) / (10 + step)))

    @torch.no_grad()
    def update(self) -> None:
        """Make a step of the average, after that of the optimizer."""
        if not self.averages:
            return
        changes = torch._foreach_sub(list(self.current.values()), list(self.averages.values()))
        torch._foreach_mul_(changes, self.rate)
        torch._foreach_add_(list(self.averages.values()), changes)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights of the network and their average, in place."""
        for name, average in self.averages.items():
            weight = self.current[name].clone()
            self.current[name].copy_(average)
            average.copy_(weight)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the network have the averaged weights within the context."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def deploy(self) -> None:
        """Give the network the averaged weights, at the end of a stage."""
        for name, average in self.averages.items():
            self.current[name].copy_(average)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by the names of the weights, for a checkpoint."""
        return self.averages

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load stored averages; raise ValueError if they are of another network."""
        if state.keys() != self.averages.keys():
            raise ValueError("the checkpoint has no average of these weights")
        for name, average in self.averages.items():
            if state[name].shape != average.shape:
                raise ValueError(f"the average of {name} has the shape {tuple(state[name].shape)}")
            average.copy_(state[name])
