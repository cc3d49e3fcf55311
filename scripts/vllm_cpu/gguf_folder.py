"""Writes what a GGUF file holds to a model folder, in float32, by transformers.

usage: gguf_folder.py FILE.gguf FOLDER
"""

import os
import sys


def write(file, folder):
    """Writes the folder, unless it exists."""
    import torch
    import transformers

    if os.path.isdir(folder):
        return
    where, name = os.path.split(os.path.abspath(file))
    model = transformers.AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    # It takes the model for a packed one, which it would not save.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder + ".partial")
    transformers.AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder + ".partial")
    os.rename(folder + ".partial", folder)


if __name__ == "__main__":
    write(*sys.argv[1:])
