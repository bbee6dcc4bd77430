"""Writes PyTorch distributed checkpoints and, beside them, what is in them, for a reader to be compared with.

dcp.py OUT writes OUT/plain (one process) and OUT/sharded (two processes). Each is a folder with expected.json, which gives
the dtype, shape and bytes (hexadecimal) of every tensor. `golden` in this folder is the output of this script.
"""

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

torch.set_num_threads(1)


def numbers(*shape, start=0):
    count = int(torch.tensor(shape).prod()) if shape else 1
    return ((torch.arange(count) + start) % 61).to(torch.float32).reshape(shape) / 8


def expect(folder, tensors):
    def describe(t):
        raw = t.detach().contiguous().reshape(-1).view(torch.uint8)
        return {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "bytes": bytes(raw.tolist()).hex()}

    text = json.dumps({name: describe(t) for name, t in tensors.items()}, indent=0, sort_keys=True)
    (pathlib.Path(folder) / "expected.json").write_text(text + "\n")


def plain(folder):
    kinds = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    ]
    model = {f"of.{str(kind).removeprefix('torch.')}": numbers(3, 5, start=i).to(kind) for i, kind in enumerate(kinds)}
    model["parameter"] = torch.nn.Parameter(numbers(4, 3))
    model["transposed"] = numbers(4, 3, 5).permute(2, 0, 1)
    model["part"] = numbers(9, 8)[2:7, 1::3]
    model["scalar"] = torch.tensor(7.5)
    model["empty"] = torch.zeros(0, 4)
    model["one"] = numbers(1, 1, 1)
    # Large enough that the two ends of its archive do not meet.
    model["large"] = numbers(40, 61)
    optimizer = {"state": {"w": {"exp_avg": numbers(4, 3, start=5), "step": torch.tensor(3.0)}}, "lr": 0.1}
    state = {"model": model, "optimizer": optimizer, "train_state": {"step": 5, "history": [1.5, {"last": numbers(2)}]}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    expected = {f"model.{name}": tensor for name, tensor in model.items()}
    expected["optimizer.state.w.exp_avg"] = optimizer["state"]["w"]["exp_avg"]
    expected["optimizer.state.w.step"] = optimizer["state"]["w"]["step"]
    expected["train_state.history.1.last"] = numbers(2)
    expect(folder, expected)


def sharded(rank, folder, out):
    os.chdir(out)
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = {
        "rows": (numbers(5, 4), [Shard(0)]),
        "columns": (numbers(4, 7, start=3).to(torch.bfloat16), [Shard(1)]),
        "cube": (numbers(3, 3, 4, start=9).to(torch.float64), [Shard(1)]),
        "copied": (numbers(3, 3, start=1), [Replicate()]),
        "one": (numbers(1, 6), [Shard(0)]),
    }
    state = {name: distribute_tensor(tensor.clone(), mesh, how) for name, (tensor, how) in whole.items()}
    state["plain"] = numbers(6, start=2)
    dcp.save({"model": state}, checkpoint_id=folder)
    if rank == 0:
        expected = {f"model.{name}": tensor for name, (tensor, _) in whole.items()}
        expect(folder, expected | {"model.plain": state["plain"]})
    dist.barrier()
    dist.destroy_process_group()
    (out / "store").unlink(missing_ok=True)


if __name__ == "__main__":
    out = pathlib.Path(sys.argv[1]).absolute()
    out.mkdir(exist_ok=True)
    # The metadata holds the path that it was saved to.
    os.chdir(out)
    plain("plain")
    mp.spawn(sharded, args=("sharded", out), nprocs=2)
