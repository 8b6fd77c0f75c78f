"""A reference ZeRO-1 Adam: whole parameters on every rank, moments cut by ranges of one buffer.

All parameters in float32 are laid out one after the other and padded to a multiple of the ranks;
each rank owns one range. What belongs to a parameter in a range is a `FlatShard`; padding is not.

Source: ZeRO, arXiv 1910.02054, section 5.1 (optimizer state partitioning).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from planish.checkpoint.adapters.placement import FlatShard

MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero1Adam:
    """Adam with decoupled weight decay; equal to torch.optim.AdamW up to the sum over ranks."""

    def __init__(self, named, *, group=None, rank=None, size=None, lr=1e-2, weight_decay=0.01):
        self.parameters = dict(named)
        self.group = group
        self.rank = dist.get_rank(group) if rank is None else rank
        self.size = dist.get_world_size(group) if size is None else size
        self.options = {
            "lr": lr,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": weight_decay,
        }
        self.starts, total = {}, 0
        for name, parameter in self.parameters.items():
            self.starts[name] = total
            total += parameter.numel()
        self.length = -(-total // self.size)
        self.moments = {key: torch.zeros(self.length) for key in MOMENTS}
        self.steps = torch.zeros(())

    def ranges(self):
        """Yield (name, first and one past the last element of the parameter, place in the buffer)
        of what this rank owns."""
        low, high = self.rank * self.length, (self.rank + 1) * self.length
        for name, parameter in self.parameters.items():
            start = max(low, self.starts[name]) - self.starts[name]
            stop = min(high, self.starts[name] + parameter.numel()) - self.starts[name]
            if start < stop:
                yield name, start, stop, self.starts[name] + start - low

    def flat(self, tensors):
        """Return a buffer of this rank's range of one tensor per parameter."""
        buffer = torch.zeros(self.length)
        for name, start, stop, place in self.ranges():
            buffer[place : place + stop - start] = tensors[name].reshape(-1)[start:stop]
        return buffer

    @torch.no_grad()
    def step(self):
        """Average the gradients, update this rank's range, gather the parameters."""
        for parameter in self.parameters.values():
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= self.size
        self.steps += 1
        (beta1, beta2), lr = self.options["betas"], self.options["lr"]
        data = self.flat(self.parameters)
        grad = self.flat({name: p.grad for name, p in self.parameters.items()})
        data.mul_(1 - lr * self.options["weight_decay"])
        first, second = self.moments["exp_avg"], self.moments["exp_avg_sq"]
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        steps = float(self.steps)
        denominator = (second / (1 - beta2**steps)).sqrt_().add_(self.options["eps"])
        data.addcdiv_(first / (1 - beta1**steps), denominator, value=-lr)
        whole = torch.empty(self.length * self.size)
        dist.all_gather_into_tensor(whole, data, group=self.group)
        for name, parameter in self.parameters.items():
            start = self.starts[name]
            parameter.copy_(whole[start : start + parameter.numel()].view_as(parameter))
            parameter.grad = None

    def state(self):
        """Return the optimizer's part of a train state, framework `flat`."""
        found = {"param_groups": [{"params": list(self.parameters), **self.options}]}
        for key, buffer in self.moments.items():
            for name, start, stop, place in self.ranges():
                shape = tuple(self.parameters[name].shape)
                data = buffer[place : place + stop - start]
                zeros = (0,) * len(shape)
                shard = FlatShard(f"{name}.{key}", shape, zeros, shape, start, stop, data)
                found[f"{name}.{key}"] = shard
        # One counter for all: every parameter has its own in the state, all of them this one.
        return found | {f"{name}.step": self.steps for name in self.parameters}

    def take(self, state):
        """Take over the options that a load has put into `state`."""
        group = state["param_groups"][0]
        self.options = {key: group[key] for key in self.options}
