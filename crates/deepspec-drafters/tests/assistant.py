"""Draft probabilities of a Gemma 4 assistant in transformers, behind given prompts and for given drafts.

Arguments: folder of the target, folder of the assistant, JSON file with a list of {"prompt", "anchor", "tokens"}. Prints a list of
[tokens, vocabulary] probabilities. The keys of the target end before the anchor.
"""

import json
import sys

import assistant_models
import torch

torch.set_grad_enabled(False)
target_dir, assistant_dir, cases = sys.argv[1:]
target, assistant = assistant_models.load(target_dir, assistant_dir)

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
