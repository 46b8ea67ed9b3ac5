"""The ranks of test_vote: `python vote_ranks.py WORLD_SIZE FOLDER`.

Rank 1 wishes for 2 at its step 25, and rank 2 for 1 at step 60. Each rank writes the answers that were not 0, by step.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from ckpt_async.torch import Vote
from tests.ranks import become_ranks

world_size, folder = int(sys.argv[1]), Path(sys.argv[2])
rank = become_ranks(world_size)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
step = 0
vote = Vote(clock=lambda: step * 0.1)  # ten steps per second
answers = {}
for step in range(1, 101):
    if rank == 1 and step == 25:
        vote.wish(2)
    if rank == 2 and step == 60:
        vote.wish(1)
    if answer := vote.step():
        answers[step] = answer
vote.leave()  # all leave at the same step, so nobody waits
late = Vote(clock=lambda: step * 0.1)
for _ in range(10 if rank == 0 else 100):  # rank 0 finishes before the others
    step += 1
    late.step()
late.leave()
dist.barrier()
(folder / f"answers-{rank}.json").write_text(json.dumps(answers))
dist.destroy_process_group()
