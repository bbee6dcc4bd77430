"""A plain Llama in PyTorch, in double precision, for comparison.

Reads a folder that holds config.json, tokens and labels (int64) and every parameter (float64), each a raw little-endian
file; writes logits, loss and every gradient beside them.
"""

import json
import math
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
folder = pathlib.Path(sys.argv[1])
config = json.loads((folder / "config.json").read_text())
dim, heads, kv_heads = config["dim"], config["n_heads"], config["n_kv_heads"]
head_dim = dim // heads


def read(name, dtype, shape):
    return torch.from_numpy(np.fromfile(folder / name, dtype=dtype).reshape(shape))


batch, seq = config["batch"], config["seq"]
tokens = read("tokens", np.int64, (batch, seq))
labels = read("labels", np.int64, (batch, seq))
documents = read("documents", np.int64, (batch, seq))
weights = {name: read(name, np.float64, shape).requires_grad_() for name, shape in config["parameters"].items()}


def frequencies():
    f = 1.0 / config["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    scaling = config["rope_scaling"]
    if scaling is None:
        return f
    factor, low, high, context = scaling
    scaled = []
    for value in f.tolist():
        wavelength = 2 * math.pi / value
        if wavelength < context / high:
            scaled.append(value)
        elif wavelength > context / low:
            scaled.append(value / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * value / factor + smooth * value)
    return torch.tensor(scaled, dtype=torch.float64)


def norm(x, weight):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + config["norm_eps"]) * weight


angles = torch.outer(torch.arange(seq, dtype=torch.float64), frequencies())
cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]


def rotate(x):
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


allowed = torch.ones(seq, seq, dtype=torch.bool).tril()[None] & (documents[:, :, None] == documents[:, None, :])
x = weights["tok_embeddings.weight"][tokens]
for layer in range(config["n_layers"]):
    w = lambda part: weights[f"layers.{layer}.{part}.weight"]
    h = norm(x, w("attention_norm"))
    q = rotate((h @ w("attention.wq").T).view(batch, seq, heads, head_dim)).transpose(1, 2)
    k = rotate((h @ w("attention.wk").T).view(batch, seq, kv_heads, head_dim)).transpose(1, 2)
    v = (h @ w("attention.wv").T).view(batch, seq, kv_heads, head_dim).transpose(1, 2)
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(head_dim)).masked_fill(~allowed[:, None], -math.inf)
    x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, dim) @ w("attention.wo").T
    h = norm(x, w("ffn_norm"))
    x = x + (F.silu(h @ w("feed_forward.w1").T) * (h @ w("feed_forward.w3").T)) @ w("feed_forward.w2").T
output = weights["tok_embeddings.weight" if config["tied"] else "output.weight"]
logits = norm(x, weights["norm.weight"]) @ output.T
loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
loss.backward()

logits.detach().numpy().tofile(folder / "logits")
loss.detach().numpy().tofile(folder / "loss")
for name, weight in weights.items():
    weight.grad.numpy().tofile(folder / f"{name}.grad")
