"""What most people write: 64 threads that share one openai client. Prints the seconds from the first to the last answer."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

url, rows, output, threads = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5)


def answer(line):
    row = json.loads(line)
    said = []
    for message in row["conversations"]:
        if message["role"] == "assistant":
            continue
        said.append({"role": message["role"], "content": message["content"]})
        if message["role"] == "user":
            completion = client.chat.completions.create(model="tiny", messages=said, temperature=0, max_tokens=64)
            said.append({"role": "assistant", "content": completion.choices[0].message.content})
    return json.dumps({**row, "conversations": said, "status": "success"})


with open(rows) as lines, open(output, "w") as out, ThreadPoolExecutor(threads) as pool:
    started = time.perf_counter()
    for line in pool.map(answer, lines):
        out.write(line + "\n")
    print(time.perf_counter() - started)
