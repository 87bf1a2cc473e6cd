"""A conversation whose answers are streamed; each turn takes the turns before it from the prefix cache.

python examples/python/chat.py [MODEL] [CHAT_TEMPLATE]
"""

from __future__ import annotations

import sys

from kvanta import LLM, SamplingParams

QUESTIONS = ["Why is the sky blue?", "And why is it red in the evening?"]


def main(model: str = "smollm2", chat_template: str | None = None) -> None:
    llm = LLM(model, chat_template=chat_template, kv_cache_dtype="int8", max_model_len=512)
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=1)
    messages = [{"role": "system", "content": "You are brief."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        prompt = llm.chat_prompt(messages)
        answer, cached = "", 0
        for text, output in llm.stream(prompt, params):
            print(text, end="", flush=True)
            answer += text
            cached = output.num_cached_tokens
        print(f"\n({cached} of {len(prompt.token_ids)} prompt tokens from the cache)")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(*sys.argv[1:])
