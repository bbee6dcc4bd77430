"""Writes the lists of torch.distributed.pipelining (torch 2.13) that lie beside this file.

    python torch.py > torch_wide.csv
    python torch.py lowered > torch_lowered.csv
"""

import sys

# This folder would hide torch itself.
sys.path.pop(0)

import torch.distributed.pipelining.schedules as schedules

CLASSES = {
    "LoopedBFS": schedules.ScheduleLoopedBFS,
    "Interleaved1F1B": schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": schedules.ScheduleZBVZeroBubble,
    "DualPipeV": schedules.ScheduleDualPipeV,
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Stage:
    """What a schedule asks of a stage before it runs."""

    def __init__(self, index, stages, ranks):
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank = ranks, 0
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward, self.submod, self.group, self.device = True, None, None, "cpu"


def build(name, ranks, stages_per_rank, microbatches):
    count = ranks * stages_per_rank
    mine = [0, count - 1] if name in V_SHAPED else range(0, count, ranks)
    stages = [Stage(index, count, ranks) for index in mine]
    return CLASSES[name](stages, microbatches, loss_fn=lambda output, target: None)


def write(name, ranks, stages_per_rank, microbatches, lowered):
    try:
        schedule = build(name, ranks, stages_per_rank, microbatches)
    except ValueError:
        return  # sizes that torch does not take
    order = schedule.pipeline_order
    if lowered:
        schedule._prepare_schedule_with_comms(order)
        order = schedule.pipeline_order_with_comms
    print("#", name, ranks, stages_per_rank, microbatches)
    for rank in sorted(order):
        print(",".join("" if action is None else str(action) for action in order[rank]))


lowered = sys.argv[1:] == ["lowered"]
for name in CLASSES:
    for ranks in [3] if lowered else [1, 2, 3, 5]:
        for stages_per_rank in [2] if lowered else [2] if name in V_SHAPED else [1, 2, 3]:
            for microbatches in [6] if lowered else [1, 3, 6, 10]:
                write(name, ranks, stages_per_rank, microbatches, lowered)
