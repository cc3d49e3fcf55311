#!/usr/bin/env python3
"""Has vLLM's build for CPUs answer prompts, with or without a drafter, and writes what every cycle accepted.

usage: vllm_ask.py TARGET PROMPTS.jsonl OUT.jsonl MAX_TOKENS [METHOD DRAFTER COUNT]

TARGET is a folder, or a GGUF file, which transformers converts to a folder beside OUT. A line of PROMPTS has `suite`,
`id` and `prompt`, the user's only turn. Lines of OUT come in that order and have these keys:

    suite, id    as in PROMPTS
    token_ids    the answer
    finish       the reason of its end
    accepted     drafted tokens accepted in each cycle; null without a drafter
    seconds      this answer's share of the time of all

Answers are greedy, in float32.
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import json
import os
import time

target, prompts, out, most, *draft = sys.argv[1:]
method, drafter, count = draft if draft else (None, None, None)
# Blocks behind anchors run in vLLM's newer runner, whose kernels are Triton's.
needs_triton = method in ("dspark", "dflash")
if needs_triton:
    # Before anything imports Triton: what is made without it stays a kernel to be compiled.
    os.environ["TRITON_INTERPRET"] = "1"
# One process, so that what is mended here is mended where the model runs.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE=os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"))
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")


def folder_of(file):
    """A folder of what the GGUF holds, which is not made twice."""
    import torch
    import transformers

    made = os.path.join(os.path.dirname(os.path.abspath(out)), os.path.basename(file) + ".folder")
    if not os.path.isdir(made):
        where, name = os.path.split(os.path.abspath(file))
        model = transformers.AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
        # It takes the model for a packed one, which it would not save.
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(made + ".partial")
        transformers.AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(made + ".partial")
        os.rename(made + ".partial", made)
    return made


def interpret_triton():
    """Triton compiles nothing for CPUs; its interpreter runs the kernels, if slowly."""
    import torch
    import triton.backends
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase

    class Compiler(BaseBackend):
        supports_target = staticmethod(lambda target: target.backend == "cpu")
        hash = lambda self: "interpreted"
        parse_options = lambda self, options: options
        load_dialects = lambda self, context: None
        get_module_map = lambda self: {}

        def add_stages(self, stages, options):
            raise NotImplementedError("kernels are interpreted, not compiled")

    class Driver(DriverBase):
        is_active = classmethod(lambda cls: True)
        map_python_to_cpp_type = lambda self, kind: kind
        get_current_target = lambda self: GPUTarget("cpu", 0, 1)
        get_current_device = lambda self: 0
        get_current_stream = lambda self, device=0: 0
        get_active_torch_device = lambda self: torch.device("cpu")
        get_device_interface = lambda self: torch.cpu

        def get_benchmarker(self):
            from triton.testing import do_bench

            return do_bench

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=Compiler, driver=Driver)


def mend():
    """What vLLM 0.32 does wrongly, or cannot do, on CPUs."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    # Its kernel norms the keys of all draft layers by the first one's weights.
    def each_by_its_own(model, keys):
        normed = torch.empty_like(keys)
        for layer, weights in enumerate(model._k_norm_weights):
            ops.rms_norm(normed[layer], keys[layer], weights, model._rms_norm_eps)
        return normed

    DFlashQwen3Model._normalize_context_k = each_by_its_own
    if needs_triton:
        import triton.language as tl
        import triton.language.extra.libdevice as libdevice

        # The interpreter has none of the device's own functions.
        libdevice.log1p = lambda x: tl.log(x + 1.0)


def main():
    with open(prompts) as file:
        asked = [json.loads(line) for line in file if line.strip()]
    folder = folder_of(target) if target.endswith(".gguf") else target
    if needs_triton:
        interpret_triton()
    from vllm import LLM, SamplingParams

    settings = {}
    if method:
        mend()
        settings["speculative_config"] = {"method": method, "model": drafter, "num_speculative_tokens": int(count)}
        settings["per_request_spec_decode_metrics"] = "detailed"
    # All of a prompt fits, and its answer.
    with open(os.path.join(folder, "config.json")) as file:
        longest = json.load(file)["max_position_embeddings"]
    engine = LLM(
        model=folder, dtype="float32", max_model_len=longest, enforce_eager=True, max_num_seqs=16,
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
