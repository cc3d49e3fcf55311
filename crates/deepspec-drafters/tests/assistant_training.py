"""Losses and gradients of a Gemma 4 assistant in transformers, position by position.

Arguments: folder of the target, folder of the assistant, JSON file, safetensors file to write. The JSON holds "samples", a list of
{"input_ids", "loss_mask"}, the weights of the steps, the loss denominator, and a folder with the config of another assistant. Prints the sum of
the cross entropies of each step and names and shapes of the other assistant's tensors. The file holds the gradients.
"""

import json
import sys

import assistant_models
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Gemma4AssistantForCausalLM

target_dir, assistant_dir, case_file, gradients = sys.argv[1:]
case = json.load(open(case_file))
target, assistant = assistant_models.load(target_dir, assistant_dir)

step_weights = case["step_weights"]
steps = len(step_weights)
entropies = [0.0] * steps
loss = 0.0
for sample in case["samples"]:
    ids, mask = sample["input_ids"], sample["loss_mask"]
    with torch.no_grad():
        output = target(input_ids=torch.tensor([ids]), use_cache=True, return_shared_kv_states=True)
    assert all(k.shape[2] == len(ids) for k, _ in output.shared_kv_states.values())
    # All steps have the positions whose last label is in the text.
    for t in range(len(ids) - steps - 1):
        seen = {kind: (k[:, :, : t + 1], v[:, :, : t + 1]) for kind, (k, v) in output.shared_kv_states.items()}
        state = output.last_hidden_state[:, t : t + 1]
        for step in range(steps):
            embedding = target.embed_tokens(torch.tensor([[ids[t + 1 + step]]])).detach()
            made = assistant(
                inputs_embeds=torch.cat([embedding, state], dim=-1),
                position_ids=torch.tensor([[t + 1]]),
                shared_kv_states=dict(seen),
                attention_mask=torch.ones(1, t + 1, dtype=torch.long),
            )
            state = made.last_hidden_state
            label = t + 2 + step
            if mask[label]:
                entropy = torch.nn.functional.cross_entropy(made.logits[0], torch.tensor([ids[label]]))
                entropies[step] += entropy.item()
                loss = loss + step_weights[step] * entropy
(loss / case["denominator"]).backward()
named = {name: p.grad for name, p in assistant.named_parameters() if p.grad is not None}
save_file({name: gradient.contiguous() for name, gradient in named.items()}, gradients)

other = Gemma4AssistantForCausalLM(AutoConfig.from_pretrained(case["other"]))
kept = {name: list(tensor.shape) for name, tensor in other.state_dict().items() if name != "lm_head.weight"}
json.dump({"entropies": entropies, "other": kept}, sys.stdout)
