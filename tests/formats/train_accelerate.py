"""accelerate's `save_state` with FSDP on two processes, which knows nothing of ckpt_async.

On CPUs, accelerate does not turn FSDP on by itself. Says on stdout when each save has begun and ended.
"""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, ProjectConfiguration
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if __name__ == "__main__":
    config = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    optimizer = accelerator.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    accelerator._models.append(model)
    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT", fsdp_version=2)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    for step in range(int(sys.argv[2])):
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"saving {step}", flush=True)
        accelerator.save_state()
        accelerator.wait_for_everyone()
        accelerator.print(f"saved {step}", flush=True)
