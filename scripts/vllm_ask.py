#!/usr/bin/env python3
"""Has vLLM's build for CPUs answer prompts, with or without a drafter, and writes what every cycle accepted.

usage: vllm_ask.py TARGET PROMPTS.jsonl OUT.jsonl MAX_TOKENS [METHOD DRAFTER COUNT [parallel_drafting]]

TARGET is a folder, or a GGUF file, which transformers converts to a folder beside OUT. A line of PROMPTS has `suite`,
`id` and `prompt`, the user's only turn. Lines of OUT come in that order and have these keys:

    suite, id    as in PROMPTS
    token_ids    the answer
    finish       the reason of its end
    accepted     drafted tokens accepted in each cycle; null without a drafter
    seconds      this answer's share of the time of all

Answers are greedy, in float32, or in bfloat16 where layers have linear attention. DRAFTER is a folder, or - for the
target's own MTP layer. With `parallel_drafting` the drafter drafts all tokens in one pass.
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import json
import os
import time

target, prompts, out, most, *draft = sys.argv[1:]
method, drafter, count, *parallel = draft if draft else (None, None, None)
if parallel not in ([], ["parallel_drafting"]):
    sys.exit(f"vllm_ask: {parallel[0]} is unknown; expected parallel_drafting or nothing")
# vLLM finds the patches for CPUs there.
patches = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vllm_cpu")
sys.path.insert(0, patches)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [patches, os.environ.get("PYTHONPATH")]))
is_hybrid = False
if not target.endswith(".gguf"):
    with open(os.path.join(target, "config.json")) as file:
        config = json.load(file)
    is_hybrid = "linear_attention" in config.get("text_config", config).get("layer_types", [])
# Blocks behind anchors run in vLLM's newer runner, whose kernels are Triton's. Linear attention has no others.
if method in ("dspark", "dflash") or is_hybrid:
    # Before anything imports Triton: what is made without it stays a kernel to be compiled.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE=os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"))
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")


def main():
    with open(prompts) as file:
        asked = [json.loads(line) for line in file if line.strip()]
    folder = target
    if target.endswith(".gguf"):
        import gguf_folder

        folder = os.path.join(os.path.dirname(os.path.abspath(out)), os.path.basename(target) + ".folder")
        gguf_folder.write(target, folder)
    from vllm import LLM, SamplingParams

    settings = {}
    if method:
        settings["speculative_config"] = {"method": method, "num_speculative_tokens": int(count)}
        if drafter != "-":
            settings["speculative_config"]["model"] = drafter
        if parallel:
            settings["speculative_config"]["parallel_drafting"] = True
        settings["per_request_spec_decode_metrics"] = "detailed"
    # All of a prompt fits, and its answer.
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
        longest = config.get("text_config", config)["max_position_embeddings"]
    engine = LLM(
        model=folder, dtype="bfloat16" if is_hybrid else "float32", max_model_len=longest, enforce_eager=True, max_num_seqs=16,
        max_num_batched_tokens=max(2048, longest), enable_prefix_caching=False, generation_config="vllm", seed=0, **settings,
    )
    stops = []
    generation = os.path.join(folder, "generation_config.json")
    if os.path.exists(generation):
        with open(generation) as file:
            stops = json.load(file).get("eos_token_id") or []
    sampling = SamplingParams(temperature=0, max_tokens=int(most), stop_token_ids=stops if isinstance(stops, list) else [stops])
    began = time.monotonic()
    answers = engine.chat(
        [[{"role": "user", "content": row["prompt"]}] for row in asked], sampling,
        chat_template_kwargs={"enable_thinking": False}, use_tqdm=False,
    )
    share = (time.monotonic() - began) / max(len(asked), 1)
    with open(out + ".partial", "w") as file:
        for row, answer in zip(asked, answers):
            answer = answer.outputs[0]
            told = getattr(answer, "spec_decode_metrics", None)
            if method and told is None:
                sys.exit("vllm_ask: vLLM told nothing of its cycles; is the drafter in use?")
            file.write(json.dumps({
                "suite": row["suite"], "id": row["id"], "token_ids": list(answer.token_ids), "finish": answer.finish_reason,
                "accepted": told.to_dict()["per_step_accepted"] if told else None, "seconds": share,
            }) + "\n")
    os.replace(out + ".partial", out)


# The engine may start processes that read this file again.
if __name__ == "__main__":
    main()
