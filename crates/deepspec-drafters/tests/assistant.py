"""Draft probabilities of a Gemma 4 assistant in transformers, behind given prompts and for given drafts.

Arguments: folder of the target, folder of the assistant, JSON file with a list of {"prompt", "anchor", "tokens"}. Prints a list of
[tokens, vocabulary] probabilities. The keys of the target end before the anchor.
"""

import json
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Gemma4UnifiedAssistantForCausalLM, Gemma4UnifiedTextModel

torch.set_grad_enabled(False)
target_dir, assistant_dir, cases = sys.argv[1:]
config = AutoConfig.from_pretrained(target_dir).text_config
config._attn_implementation = "eager"
target = Gemma4UnifiedTextModel(config).float().eval()
prefix = "model.language_model."
weights = load_file(f"{target_dir}/model.safetensors")
target.load_state_dict({name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)})
assistant_config = AutoConfig.from_pretrained(assistant_dir)
# transformers sees windows of a query in front of the keys, and counts their last key twice.
assistant_config.text_config.sliding_window -= 2
assistant_config._attn_implementation = "eager"
assistant, loading = Gemma4UnifiedAssistantForCausalLM.from_pretrained(
    assistant_dir, config=assistant_config, dtype=torch.float32, output_loading_info=True
)
assert not loading["unexpected_keys"] and not loading["mismatched_keys"], loading
assert set(loading["missing_keys"]) <= {"lm_head.weight"}, loading
assistant.eval()

found = []
for case in json.load(open(cases)):
    prompt = torch.tensor([case["prompt"]])
    output = target(input_ids=prompt, use_cache=True, return_shared_kv_states=True)
    state = output.last_hidden_state[:, -1:]
    position = torch.tensor([[prompt.shape[1]]])
    probs = []
    for token in [case["anchor"], *case["tokens"][:-1]]:
        embedding = target.embed_tokens(torch.tensor([[token]]))
        step = assistant(
            inputs_embeds=torch.cat([embedding, state], dim=-1),
            position_ids=position,
            shared_kv_states=dict(output.shared_kv_states),
            attention_mask=torch.ones(1, prompt.shape[1], dtype=torch.long),
        )
        probs.append(step.logits[0, 0].softmax(-1).tolist())
        state = step.last_hidden_state
    found.append(probs)
json.dump(found, sys.stdout)
