"""Speculative decoding by the reference's own evaluator, the baseline of speed.rs.

    DEEPSPEC_REFERENCE=CLONE_OF_DEEPSPEC python reference.py --target T --draft D --prompts FILE --max-new-tokens N --temperature T

Its loop, drafter and verification, one sample at a time, with transformers' target, in float32 (the evaluator loads bfloat16, for GPUs). Prompts
come as lines {"id": ..., "prompt": [token ids]}, so that nothing depends on tokenizer or template. The first is decoded once untimed; the
clock then runs over all of them, prefill included. What is recorded of confidences is left out.
"""

import argparse
import json
import os
import sys
import time
from types import SimpleNamespace

import torch

sys.path.insert(0, os.environ["DEEPSPEC_REFERENCE"])
from deepspec.eval.dspark.evaluator import Qwen3DSparkEvaluator
from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel
from transformers import AutoModelForCausalLM

SEED = 980406


class Evaluator(Qwen3DSparkEvaluator):
    """Without process group, GPU, tokenizer and recorder."""

    def __init__(self, args):
        load = lambda kind, folder: kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.args = SimpleNamespace(max_new_tokens=args.max_new_tokens, temperature=args.temperature, confidence_threshold=0.0)
        self.target_model = load(AutoModelForCausalLM, args.target)
        self.draft_model = load(Qwen3DSparkModel, args.draft)
        self.confidence_head_recorder = None


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder of a Qwen3 model")
    parser.add_argument("--draft", required=True, help="folder of a DSpark checkpoint")
    parser.add_argument("--prompts", required=True, help='lines {"id": ..., "prompt": [token ids]}')
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    return parser.parse_args()


def main():
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    evaluator = Evaluator(args)
    stop = evaluator.target_model.generation_config.eos_token_id
    stop = stop if isinstance(stop, list) else [stop]
    with open(args.prompts) as lines:
        rows = [json.loads(line) for line in lines]

    run = lambda row: evaluator.generate_one_sample(input_ids=torch.tensor([row["prompt"]]), stop_token_ids=stop)
    run(rows[0])
    start = time.perf_counter()
    answers = [run(row) for row in rows]
    seconds = time.perf_counter() - start

    committed = [length for answer in answers for length in answer.acceptance_lengths]
    new = lambda answer: answer.output_ids[0, answer.num_input_tokens :].tolist()
    report = {
        "tokens": sum(answer.num_output_tokens for answer in answers),
        "seconds": seconds,
        "accepted_length": sum(committed) / len(committed),
        "outputs": {row["id"]: new(answer) for row, answer in zip(rows, answers)},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
