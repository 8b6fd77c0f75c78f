"""The exchange of M attention and N expert ranks by collective calls, to compare with.

All ranks take part in each call, with pieces padded to one size: nobody may leave before everybody
has come.
"""

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store


class CollectiveBaseline:
    """`all_to_all` over gloo of padded pieces from one role to the other."""

    def __init__(self, store: Store, rank: int, num_attention: int, num_expert: int) -> None:
        self.rank, self.num_attention = rank, num_attention
        self.num_ranks = num_attention + num_expert
        self.is_attention = rank < num_attention
        store = PrefixStore("collective", store)
        self.group = ProcessGroupGloo(store, rank, self.num_ranks, timedelta(seconds=300))

    def exchange(self, pieces: Tensor, *, to_experts: bool) -> Tensor:
        """Send one piece to each rank of the other role, or take part without any.

        Args:
            pieces: [ranks of the other role, bytes] uint8; what a rank that only receives passes
                here is not read, but has the shape of what it gets.
            to_experts: the direction, equal on all ranks.

        Returns:
            [ranks of the other role, bytes] uint8; empty on ranks that only send.
        """
        num_bytes = pieces.shape[1]
        experts = range(self.num_attention, self.num_ranks)
        others = [
            num_bytes * (number in experts if self.is_attention else number not in experts)
            for number in range(self.num_ranks)
        ]
        sends = self.is_attention == to_experts
        none = [0] * self.num_ranks
        source = pieces.flatten() if sends else pieces.new_empty(0)
        target = torch.empty_like(pieces).flatten() if not sends else pieces.new_empty(0)
        out_sizes, in_sizes = (none, others) if sends else (others, none)
        self.group.alltoall_base(target, source, out_sizes, in_sizes).wait()
        return target.view(-1, num_bytes)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.group.barrier().wait()
