"""A Composer Trainer with FSDP and sharded checkpoints, on CPUs. Composer needs a GPU only for its number."""

import sys

import torch

from tests.compat.composer.train import main

torch.cuda.current_device = lambda: torch.device("cpu")

if __name__ == "__main__":
    main(*sys.argv[1:], parallelism_config={"fsdp": {"state_dict_type": "sharded"}})
