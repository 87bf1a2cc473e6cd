"""LLM on the shipped model: generate, chat, stream, stop, seeds, log-probabilities, logits, stats."""

import gc
import threading
from typing import Any

import numpy as np
import pytest
from stories import GREEDY, PROMPT

from kvanta import LLM, InputError, SamplingParams
from kvanta.engine.beam_search import BeamSearchParams
from kvanta.engine.generation import Generation
from kvanta.evaluate.divergence import log_softmax


def test_a_cache_of_so_many_tokens_or_pages() -> None:
    assert LLM("stories260k", num_gpu_blocks_override=40).stats()["pages_free"] == 40
    assert LLM("stories260k", max_total_tokens=2500).stats()["pages_free"] == 40
    with pytest.warns(UserWarning, match="max_model_len is 128: max_total_tokens = 100 holds no longer sequence"):
        assert LLM("stories260k", max_total_tokens=100, kv_cache_dtype="int8").config.max_model_len == 128
    with pytest.raises(InputError, match=r"max_total_tokens is 100: a cache of 128 tokens does not hold one sequence"):
        LLM("stories260k", max_total_tokens=100, max_model_len=256)
    smaller = LLM("stories260k", max_total_tokens="1k", kv_cache_dtype="int8", block_size=16, max_model_len=64)
    assert smaller.stats()["pages_free"] == 63
    with pytest.raises(
        InputError, match=r"kv_cache_memory_bytes \(\d+\) and max_total_tokens \(100\) are sizes of the same"
    ):
        LLM("stories260k", max_total_tokens=100, kv_cache_memory_bytes="1MiB")
    with pytest.raises(InputError, match="num_gpu_blocks_override must be a positive integer, got -1"):
        LLM("stories260k", num_gpu_blocks_override=-1)


def test_a_story(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, GREEDY)
    (text,) = output.outputs
    assert text.text.startswith(", there was a little girl named Lily.")
    assert output.prompt == PROMPT
    assert output.prompt_token_ids == [1, 403, 407, 261, 378]
    assert len(text.token_ids) == 24
    assert text.finish_reason == "length"
    assert output.finished


def test_prompts_of_every_kind_give_the_same(llm: LLM, story: list[int]) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    kinds: list[Any] = [
        PROMPT,
        ids,
        np.array(ids),
        [np.array(ids)],
        np.array([ids]),
        {"prompt": PROMPT},
        {"prompt_token_ids": ids},
        tuple(ids),
    ]
    for kind in kinds:
        assert llm.generate(kind, GREEDY)[0].outputs[0].token_ids == story
    mixed: list[Any] = [PROMPT, ids, {"prompt_token_ids": ids}]
    together = llm.generate(mixed, GREEDY)
    assert [output.outputs[0].token_ids for output in together] == [story] * 3


def test_outputs_keep_the_order_and_parameters_of_their_prompts(llm: LLM) -> None:
    prompts = [PROMPT, "Lily", "The dog"]
    params = [SamplingParams(temperature=0.0, max_tokens=count) for count in (9, 3, 6)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 3, 6]
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        assert llm.generate(prompt, each)[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_streaming_shows_what_generate_returns(llm: LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    pieces = [piece for piece, _ in llm.stream(PROMPT, GREEDY)]
    assert "".join(pieces) == whole
    assert len(pieces) == 24


def test_leaving_a_stream_frees_its_request(llm: LLM, story: list[int]) -> None:
    for _, output in llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=200)):
        if len(output.outputs[0].token_ids) == 3:
            break
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == story
    assert llm.stats()["running"] == llm.stats()["waiting"] == 0


def test_other_calls_go_on_while_a_stream_is_open(llm: LLM, story: list[int]) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    other = llm.stream(PROMPT, GREEDY)
    pieces = [next(stream)[0], next(other)[0]]
    results: list[Any] = []

    def call() -> None:
        results.append(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids)
        results.append(llm.logits(story))

    worker = threading.Thread(target=call, daemon=True)
    worker.start()
    worker.join(timeout=60)  # a hang would be for ever
    assert not worker.is_alive()
    call()
    assert results[0] == results[2] == story
    np.testing.assert_array_equal(results[1], results[3])
    whole = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    other.close()
    assert "".join([pieces[0], *(piece for piece, _ in stream)]) == whole
    assert llm.stats()["running"] == llm.stats()["waiting"] == 0


def test_streams_of_several_threads(llm: LLM, story: list[int]) -> None:
    results: list[list[int]] = []

    def call() -> None:
        for _, output in llm.stream(PROMPT, GREEDY):
            tokens = output.outputs[0].token_ids
        results.append(tokens)

    workers = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert results == [story] * 4


def test_a_forgotten_stream_is_closed(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=200))
    next(stream)
    assert llm.stats()["running"] == 1
    del stream
    gc.collect()
    assert llm.stats()["running"] == llm.stats()["waiting"] == 0


def test_ctrl_c_leaves_nothing_running(llm: LLM, story: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Generation, "take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT, PROMPT], GREEDY)
    assert llm.stats()["running"] == llm.stats()["waiting"] == 0
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == story


def test_stop_strings_across_tokens(llm: LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    stop = "girl nam"  # begins and ends inside tokens
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=["never", stop])
    (text,) = llm.generate(PROMPT, params)[0].outputs
    assert text.text == whole[: whole.index(stop)]
    assert (text.finish_reason, text.stop_reason) == ("stop", stop)
    assert llm.tokenizer.decode(text.token_ids).startswith(text.text.strip())
    assert "".join(piece for piece, _ in llm.stream(PROMPT, params)) == text.text
    params.include_stop_str_in_output = True
    assert llm.generate(PROMPT, params)[0].outputs[0].text == whole[: whole.index(stop) + len(stop)]


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=["a"], min_tokens=10)
    (text,) = llm.generate(PROMPT, params)[0].outputs
    assert len(text.token_ids) > 10
    assert text.stop_reason == "a"


def test_stop_tokens(llm: LLM, story: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=[story[6]])
    (text,) = llm.generate(PROMPT, params)[0].outputs
    position = story.index(story[6])
    assert text.token_ids == story[: position + 1]
    assert (text.finish_reason, text.stop_reason) == ("stop", story[6])
    shown = llm.tokenizer.detokenizer(llm.tokenizer.encode(PROMPT))
    assert text.text == shown.add(story[:position]) + shown.finish()


def test_the_end_of_the_sequence(llm: LLM) -> None:
    (text,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=500))[0].outputs
    if text.finish_reason == "stop":
        assert text.stop_reason is None
    (longer,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))[0].outputs
    assert longer.finish_reason == "length"
    assert len(longer.token_ids) + 5 == llm.config.max_model_len
    assert longer.token_ids[: len(text.token_ids)] == text.token_ids


def test_seeds(llm: LLM) -> None:
    def sample(seed: int | None, others: int = 0) -> list[int]:
        params = SamplingParams(temperature=1.0, max_tokens=20, seed=seed)
        crowd = [SamplingParams(temperature=1.0, max_tokens=20, seed=1000 + other) for other in range(others)]
        return llm.generate([PROMPT] * (1 + others), [params, *crowd])[0].outputs[0].token_ids

    assert sample(7) == sample(7)
    assert sample(7) == sample(7, others=3)
    assert sample(7) != sample(8)
    assert len({tuple(sample(None)) for _ in range(4)}) > 1


def test_a_fresh_engine_with_the_same_seed_repeats_itself() -> None:
    def sample(seed: int) -> list[list[int]]:
        fresh = LLM("stories260k", seed=seed, kv_cache_memory_bytes="8MiB", threads=1)
        params = SamplingParams(max_tokens=12)
        return [output.outputs[0].token_ids for output in fresh.generate([PROMPT, PROMPT], params)]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_several_texts_per_prompt(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(n=3, seed=5, max_tokens=12))
    assert [text.index for text in output.outputs] == [0, 1, 2]
    assert len({tuple(text.token_ids) for text in output.outputs}) == 3
    (second,) = llm.generate(PROMPT, SamplingParams(seed=6, max_tokens=12))
    assert second.outputs[0].token_ids == output.outputs[1].token_ids


def test_logprobs_equal_those_of_the_logits(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate(PROMPT, params)
    (text,) = output.outputs
    everything = [*output.prompt_token_ids, *text.token_ids]
    expected = log_softmax(llm.logits(everything))
    assert text.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    total = 0.0
    for position, entries in enumerate([*output.prompt_logprobs[1:], *text.logprobs], start=1):
        assert entries is not None
        row = expected[position - 1]
        order = np.argsort(-row, kind="stable")
        token = everything[position]
        assert next(iter(entries)) == token
        count = 2 if position < len(output.prompt_token_ids) else 3
        assert set(entries) == {token, *order[:count].tolist()}
        for index, entry in entries.items():
            assert entry.logprob == pytest.approx(row[index], abs=1e-5)  # f32 against double
            assert entry.rank == 1 + int((row > row[index]).sum())
            assert entry.decoded_token == llm.tokenizer.token_text(index)
        total += entries[token].logprob if position >= len(output.prompt_token_ids) else 0.0
    assert text.cumulative_logprob == pytest.approx(total)


def test_logits(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("Once upon a time there was a little girl named Lily. " * 8)
    logits = llm.logits(tokens)
    assert logits.shape == (len(tokens), 512)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(logits, llm.logits(np.array(tokens), chunk_tokens=64))
    np.testing.assert_array_equal(logits[:100], llm.logits(tokens[:100]))
    assert int(logits[4].argmax()) == llm.generate([tokens[:5]], GREEDY)[0].outputs[0].token_ids[0]


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_chunks_of_more_rows_than_a_layer_takes_at_once(weights: str) -> None:
    """A gated MLP computes them in parts."""
    llm = LLM("stories260k", weight_dtype=weights, threads=1, max_num_batched_tokens=512)
    tokens = np.random.default_rng(1).integers(3, 500, 500)
    np.testing.assert_array_equal(llm.logits(tokens, chunk_tokens=500), llm.logits(tokens, chunk_tokens=83))


def test_the_logits_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from kvanta.checkpoint.resolve import SHIPPED

    exact = LLM("stories260k", dtype="float32", kv_cache_dtype="fp32", kv_cache_memory_bytes="32MiB", threads=1)
    tokens = exact.tokenizer.encode("One day, Lily and her dog went to the park to play. " * 8)
    model = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED / "stories260k", dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    found = exact.logits(tokens)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_second_request_reads_the_prefix_from_the_cache(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = "There was a red ball in the park and a boy who liked it very much. " * 6
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 64
    assert second.num_cached_tokens % 64 == 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert llm.stats()["prefix_pages"] > 0


def test_prompts_of_different_salts_share_no_prefix(llm: LLM) -> None:
    llm.reset_prefix_cache()
    tokens = llm.tokenizer.encode("There was a red ball in the park and a boy who liked it very much. " * 6)

    def cached(salt: str | None) -> list[int]:
        prompt: dict[str, Any] = {"prompt_token_ids": tokens, "cache_salt": salt, "multi_modal_data": {}}
        answers = [llm.generate(prompt, GREEDY)[0].num_cached_tokens, llm.embed(prompt)[0].num_cached_tokens]
        *_, (_, streamed) = llm.stream(prompt, GREEDY)
        llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))
        return [*answers, streamed.num_cached_tokens]

    for salt in (None, "a", "b"):
        first, *others = cached(salt)
        assert first == 0
        assert all(count >= 64 for count in others)
    assert llm.generate({"prompt_token_ids": tokens, "cache_salt": "c"}, GREEDY)[0].num_cached_tokens == 0


def test_stats(llm: LLM) -> None:
    llm.generate(PROMPT, GREEDY)
    stats = llm.stats()
    assert stats["model"] == "stories260k"
    # 5 layers, K and V of 4 heads of 8, float32
    assert stats["kv_cache_dtype"] == "fp32"
    assert stats["bytes_per_token"] == 5 * 2 * 4 * 8 * 4
    assert stats["saturated"] == 0
    assert stats["generated_tokens"] >= 24
    assert len(stats["layers"]) == 5
    assert stats["threads"] == 1


def test_aliases_and_options_of_other_engines() -> None:
    with pytest.warns(UserWarning, match="gpu_memory_utilization"):
        llm = LLM(
            "stories260k", context_length=256, page_size=32, gpu_memory_utilization=0.9, kv_cache_memory_bytes="8MiB"
        )
    assert (llm.config.max_model_len, llm.config.page_size) == (256, 32)


def test_skip_layers_keep_the_models_precision() -> None:
    llm = LLM(
        "stories260k", kv_cache_dtype="int8", kv_cache_dtype_skip_layers=[0, 4], kv_cache_memory_bytes="8MiB", threads=1
    )
    schemes = [layer["scheme"] for layer in llm.stats()["layers"]]
    assert [scheme == schemes[1] for scheme in schemes] == [False, True, True, True, False]


def test_calls_from_two_threads_take_turns(llm: LLM, story: list[int]) -> None:
    results: list[list[int]] = []
    workers = [
        threading.Thread(target=lambda: results.append(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [story] * 3


def test_chat_templates_and_continued_messages(llm: LLM) -> None:
    template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    messages = [{"role": "user", "content": PROMPT}]
    (asked,) = llm.chat(messages, GREEDY, chat_template=template)
    assert asked.prompt == PROMPT + "!"
    (plain,) = llm.chat(messages, GREEDY, chat_template=template, add_generation_prompt=False)
    assert plain.prompt == PROMPT
    continued = [*messages, {"role": "assistant", "content": ", there"}]
    (longer,) = llm.chat(
        continued, GREEDY, chat_template=template, add_generation_prompt=False, continue_final_message=True
    )
    assert longer.prompt == PROMPT + ", there"
    with pytest.raises(InputError, match="continue_final_message"):
        llm.chat(continued, GREEDY, chat_template=template, continue_final_message=True)
    assert llm.get_tokenizer() is llm.tokenizer


def test_priorities(llm: LLM) -> None:
    ids = [
        llm.generate([PROMPT, "The dog"], GREEDY, priority=each)[1].outputs[0].token_ids for each in (None, 3, [2, -1])
    ]
    assert ids[0] == ids[1] == ids[2]
    with pytest.raises(InputError, match="priority has 1 entries for 2 prompts"):
        llm.generate([PROMPT, "The dog"], GREEDY, priority=[1])
    with pytest.raises(InputError, match="priority"):
        llm.generate(PROMPT, GREEDY, priority=2**40)
    with pytest.raises(InputError, match="lora_request"):
        llm.generate(PROMPT, GREEDY, lora_request="adapter")  # type: ignore[arg-type]
