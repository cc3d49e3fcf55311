"""Talks to `deepspec-data serve` with OpenAI's own client; any surprise raises."""
import sys

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
assert [model.id for model in client.models.list()] == ["tiny"]

request = dict(
    model="tiny",
    messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}],
    temperature=0,
    max_tokens=40,
)
whole = client.chat.completions.create(**request)
choice = whole.choices[0]
assert choice.finish_reason in ("stop", "length") and choice.message.role == "assistant"
assert choice.message.content or choice.message.reasoning_content
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

content, reasoning, usage, finish = "", "", None, None
for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
    usage = chunk.usage or usage
    for piece in chunk.choices:
        finish = piece.finish_reason or finish
        content += piece.delta.content or ""
        reasoning += getattr(piece.delta, "reasoning_content", None) or ""
assert content == choice.message.content, (content, choice.message.content)
assert reasoning == getattr(choice.message, "reasoning_content", ""), reasoning
assert finish == choice.finish_reason and usage == whole.usage, (finish, usage)

plain = client.chat.completions.create(
    **request, stop=["."], extra_body={"chat_template_kwargs": {"enable_thinking": False}, "top_k": 5, "min_p": 0.1}
)
assert "." not in plain.choices[0].message.content

for change, kind in [
    ({"model": "gpt-4"}, openai.NotFoundError),
    ({"temperature": 3}, openai.BadRequestError),
    ({"messages": []}, openai.BadRequestError),
]:
    try:
        client.chat.completions.create(**{**request, **change})
    except kind as error:
        assert error.message
    else:
        raise AssertionError(f"{change} was accepted")
