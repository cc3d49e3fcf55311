"""A Gemma 4 target and its assistant in transformers, for the tests of assistants."""

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Gemma4UnifiedAssistantForCausalLM, Gemma4UnifiedTextModel


def load(target_dir, assistant_dir):
    """The target and the assistant in float32, from their folders."""
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
    return target, assistant.eval()
