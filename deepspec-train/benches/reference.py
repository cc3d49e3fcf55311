"""A train step of DSpark by the reference's own modules, the baseline of step.rs: prints its peak memory in MB, and for each line that comes in the
time of one more in ms.

    DEEPSPEC_REFERENCE=CLONE_OF_DEEPSPEC python reference.py SHAPE.json [sdpa]

Model, loss and optimiser are the reference's, in float32 on one thread, without FSDP, of a single process. Nothing is compiled, as its recipes have it
on GPUs. PyTorch fuses FlexAttention on GPUs only, and elsewhere refuses its gradients; un-fused, with all scores in memory, it needs no kernel, so that
check is taken out. With `sdpa`, attention is PyTorch's own fused `scaled_dot_product_attention` instead, under the dense mask of the reference's rule.
"""

import json
import os
import sys
import time
from types import SimpleNamespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_mask

sys.path.insert(0, os.environ["DEEPSPEC_REFERENCE"])
from deepspec.modeling.dspark.loss import compute_dspark_loss
from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel, modeling
from deepspec.modeling.dspark.qwen3.config import build_draft_config
from deepspec.utils import BF16Optimizer, metrics
from transformers import Qwen3Config


class Arguments(SimpleNamespace):
    """The reference asks its arguments for names by `in`."""

    def __contains__(self, name):
        return hasattr(self, name)


def dense_mask(block_mask):
    """The mask of a `BlockMask`, [batch, 1, queries, keys]."""
    queries, keys = block_mask.seq_lengths
    return create_mask(block_mask.mask_mod, block_mask.shape[0], 1, queries, keys, device="cpu")


def build(shape, fused):
    target = Qwen3Config(
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=16,
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        vocab_size=shape["vocab"],
        max_position_embeddings=shape["tokens"] + 64,
    )
    arguments = Arguments(
        num_draft_layers=shape["layers"],
        target_layer_ids=list(range(shape["taps"])),
        confidence_head_alpha=1.0,
        confidence_head_with_markov=True,
        markov_rank=shape["rank"],
        markov_head_type="vanilla",
        block_size=shape["block"],
        mask_token_id=3,
        num_anchors=shape["anchors"],
    )
    config = build_draft_config(target_config=target, model_args=arguments)
    if fused:
        config._attn_implementation = "sdpa"
        block_mask = modeling.create_dspark_attention_mask
        modeling.create_dspark_attention_mask = lambda **arguments: dense_mask(block_mask(**arguments))
    else:
        flex_attention._validate_device = lambda *tensors: None
    model = Qwen3DSparkModel(config)
    model.set_embedding_head_trainable(False)
    return model.train()


def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024 / 1e6


def read_code():
    """Has what is mapped of files in memory, so that reading it is not counted."""
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for place, rights, *_, inode, file in (line.split(maxsplit=5) for line in maps if "/" in line):
            first, end = (int(address, 16) for address in place.split("-"))
            if inode != "0" and rights.startswith("r-") and ".so" in file:
                for page in range(first, end, 4096):
                    memory.seek(page)
                    memory.read(1)


def main():
    with open(sys.argv[1]) as file:
        shape = json.load(file)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = build(shape, fused="sdpa" in sys.argv[2:])
    optimizer = BF16Optimizer(model, lr=6e-4, total_steps=1000, warmup_ratio=0.0)
    samples, tokens, hidden = shape["samples"], shape["tokens"], shape["hidden"]

    places, text = torch.arange(samples * tokens).view(samples, tokens), torch.tensor(shape["text"])

    def step(number):
        """Milliseconds of step `number` on a core, without the making of its data."""
        ids = places if shape["distinct"] else text[(places + number * samples * tokens) % len(text)]
        data = dict(
            input_ids=ids * 31 % shape["vocab"],
            target_hidden_states=torch.randn(samples, tokens, shape["taps"] * hidden),
            loss_mask=torch.ones(samples, tokens),
            target_last_hidden_states=torch.randn(samples, tokens, hidden),
        )
        start = time.thread_time()
        outputs = model(**data)
        del data
        loss = compute_dspark_loss(
            outputs=outputs, loss_decay_gamma=4.0, ce_loss_alpha=0.1, l1_loss_alpha=0.9, confidence_head_alpha=1.0
        )
        del outputs
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.model_params, 1.0)
        optimizer.step()
        metrics.reset()
        return (time.thread_time() - start) * 1e3

    # The moments belong to the loaded state: one step that learns of zeros makes them.
    for parameter in optimizer.model_params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    read_code()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    loaded = status("VmRSS")
    step(0)
    print(status("VmHWM") - loaded, flush=True)
    for number, _ in enumerate(sys.stdin, 1):
        print(step(number), flush=True)
    dist.destroy_process_group()


main()
