"""The state of a ZeRO-1 Adam: whole parameters on every rank, moments cut by ranges of one buffer.

All parameters in float32 are laid out one after the other and padded to a multiple of the ranks;
each rank owns one range. What belongs to a parameter in a range is a `FlatShard`; padding is not.

Source: ZeRO, arXiv 1910.02054, section 5.1 (optimizer state partitioning).
"""

import torch
import torch.distributed as dist

from planish.checkpoint.adapters.placement import FlatShard

MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero1Adam:
    """Adam whose moments are sharded; it never steps."""

    def __init__(self, named, *, group, lr):
        self.parameters = dict(named)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.options = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
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
