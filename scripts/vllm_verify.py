#!/usr/bin/env python3
"""Verifies drafted blocks with vLLM's own rejection sampler, and prints how many tokens of each it accepts.

usage: vllm_verify.py BLOCKS.safetensors

Tensors of the file, for N blocks of up to K drafted tokens over a vocabulary of V:

    logits        [N, K+1, V] the target's
    draft_logits  [N, K, V] the drafter's
    tokens        [N, K] drafted tokens
    lens          [N] verified tokens of each block
    codes         [N, K] 2^24 times the uniform random numbers that accept the tokens

The output is one JSON object: lists of accepted lengths by draft_sample_method, `greedy` and `probabilistic`, and then
by rejection_sample_method, `standard` and `block`. By default vLLM drafts with `greedy`, and its sampler gets no logits
of the drafter. To save time, these lists have the first N // 4 blocks only. Triton's interpreter runs the kernels, at
temperature 1.
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import json
import os

# Before anything imports Triton: what is made without it stays a kernel to be compiled.
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "vllm_cpu"))

import deepspec_vllm_cpu

deepspec_vllm_cpu.offer_interpreter()

import safetensors.torch
import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as sampler

deepspec_vllm_cpu.patch_drafters()


@triton.jit
def uniform_of_code(seed, code, includes_zero: tl.constexpr = True):
    """Stands for the random number generator: positions carry the random numbers."""
    return code.to(tl.float32) * (1.0 / (1 << 24))


sampler.tl_rand32 = uniform_of_code


def main():
    named = safetensors.torch.load_file(sys.argv[1])
    tokens, lens, codes = named["tokens"], named["lens"], named["codes"]
    longest = tokens.shape[1]

    def accepted(blocks, draft_logits, method):
        """Accepted lengths of the first blocks."""
        rows = [(block, k) for block in range(blocks) for k in range(int(lens[block]) + 1)]
        block, place = torch.tensor(rows).T
        # The row before a drafted token carries its random number, the row itself the token.
        drafted = torch.where(place > 0, tokens[block, (place - 1).clamp(min=0)], 0)
        position = torch.where(place < lens[block], codes[block, place.clamp(max=longest - 1)], 1)
        _, sampled = sampler.rejection_sample(
            named["logits"][block, place].contiguous(),
            draft_logits,
            drafted,
            torch.cat([torch.zeros(1, dtype=torch.int64), (lens[:blocks] + 1).cumsum(0)]).to(torch.int32),
            position,
            torch.arange(blocks, dtype=torch.int32),
            block.to(torch.int32),
            place.to(torch.int32),
            torch.ones(blocks),
            torch.zeros(blocks, dtype=torch.int64),
            longest,
            use_block_verification=method == "block",
        )
        return (sampled - 1).tolist()

    drafts = {
        "greedy": (len(tokens) // 4, None),
        "probabilistic": (len(tokens), named["draft_logits"].contiguous()),
    }
    methods = ("standard", "block")
    print(json.dumps({name: {method: accepted(*of, method) for method in methods} for name, of in drafts.items()}))


main()
