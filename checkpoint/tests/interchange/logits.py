"""Runs Llamas in `transformers`, without the network.

logits.py JOBS: a JSON list of {"folder", "dtype", "tokens", "out"}, and for a model that is to be made first, also
{"make": arguments of LlamaConfig, "max_shard_size"}. Writes the logits to "out", raw, in the dtype. Ends with status 77
where there is no `transformers`.
"""

import json
import sys

try:
    import torch
    import transformers
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(77)

torch.set_num_threads(1)
float32, to_float = torch.float32, torch.Tensor.float
torch.manual_seed(0)

for job in json.load(open(sys.argv[1])):
    # `transformers` takes norms and rotations in single precision, whatever the dtype of the model. Where all is to be
    # double, single precision means double.
    double = job["dtype"] == "float64"
    torch.float32 = torch.float = torch.float64 if double else float32
    torch.Tensor.float = torch.Tensor.double if double else to_float
    dtype = torch.float64 if double else float32
    if "make" in job:
        config = transformers.LlamaConfig(**job["make"])
        model = transformers.LlamaForCausalLM(config).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
        model.save_pretrained(job["folder"], max_shard_size=job["max_shard_size"])
    model, report = transformers.LlamaForCausalLM.from_pretrained(
        job["folder"], dtype=dtype, local_files_only=True, output_loading_info=True
    )
    assert not any(report.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert model.dtype == dtype
    with torch.no_grad():
        logits = model(torch.tensor(job["tokens"]), use_cache=False).logits
    logits.to(dtype).contiguous().numpy().tofile(job["out"])
