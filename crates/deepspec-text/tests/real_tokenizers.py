"""What transformers makes of conversations, with real tokenizers.

usage: real_tokenizers.py CASES.json ANSWERS.json

CASES is a list of {"dir", "header", "end", "messages", "tools", "thinking"}. Of each the answer has the rendered text, its ids, their text again, and which ids
are the assistant's: those that tokenising the text up to a border adds. Null where the template refuses the messages. Of a case without a header the answer has the ids, and as the assistant's those that the template's own tags name.
"""

import json
import re
import sys

from transformers import PreTrainedTokenizerFast

tokenizers, answers = {}, []
for case in json.load(open(sys.argv[1])):
    folder = case["dir"]
    if folder not in tokenizers:
        tokenizers[folder] = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = tokenizers[folder]
    if case["header"] is None:
        found = tokenizer.apply_chat_template(case["messages"], return_dict=True, return_assistant_tokens_mask=True)
        answers.append({"ids": found["input_ids"], "mask": found["assistant_masks"]})
        continue
    options = {} if case["thinking"] is None else {"enable_thinking": case["thinking"]}
    try:
        text = tokenizer.apply_chat_template(case["messages"], tools=case["tools"], tokenize=False)
        prompt = tokenizer.apply_chat_template(
            case["messages"][:1], tools=case["tools"], tokenize=False, add_generation_prompt=True, **options
        )
    except Exception:
        answers.append(None)
        continue
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    ids = encode(text)
    mask = [0] * len(ids)
    pattern = re.escape(case["header"]) + r"(.*?" + re.escape(case["end"]) + r"|.*$)"
    for found in re.finditer(pattern, text, flags=re.S):
        start, end = len(encode(text[: found.start(1)])), len(encode(text[: found.end(1)]))
        mask[start:end] = [1] * max(end - start, 0)
    answers.append({
        "text": text, "prompt": prompt, "ids": ids, "mask": mask,
        "again": tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        "bare": tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
    })
json.dump(answers, open(sys.argv[2], "w"))
