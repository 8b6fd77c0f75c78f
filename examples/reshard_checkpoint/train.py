"""Train five steps on any number of processes, from where any other number has stopped.

torchrun --standalone --nproc-per-node 2 train.py FOLDER
"""

import sys

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from planish.checkpoint import CheckpointManager, Schedule

STEPS = 5


def main(folder):
    distributed.init_process_group("gloo")
    num_processes = distributed.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (num_processes,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}

    manager = CheckpointManager(folder, Schedule(interval=STEPS), "fsdp2")
    resumed = manager.resume(state)  # shares of two processes become those of three
    begin = resumed.info.step + 1 if resumed else 1

    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    for step in range(begin, begin + STEPS):
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step(step, state)  # saves at steps 5, 10, 15 ...
    manager.close()  # waits for the last upload

    if distributed.get_rank() == 0:
        print(f"{num_processes} processes: steps {begin} to {step}, loss {loss.item():.5f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
