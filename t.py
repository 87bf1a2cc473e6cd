import sys, warnings
from kvanta import LLM, SamplingParams
def go(url):
    for i in range(2):
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            llm = LLM("stories260k", kv_cache_dtype="int8", block_size=16, max_model_len=512, threads=1, kv_store=url)
            o = llm.generate([{"prompt_token_ids": [3+(j*7)%400 for j in range(200)]}], SamplingParams(max_tokens=4, temperature=0))[0]
            llm._engine.flush_prefix_cache()
            o2 = llm.generate([{"prompt_token_ids": [3+(j*5)%400 for j in range(20)]}], SamplingParams(max_tokens=1, temperature=0))[0]
            s = llm.stats()["server"] if "server" in llm.stats() else {k:v for k,v in llm.stats().items() if "store" in k or "server" in k}
            print(url[-20:], i, o.num_cached_tokens, o.outputs[0].token_ids, [str(x.message) for x in w if 'scale' not in str(x.message)], {k:s[k] for k in s if k in('hits','write_errors','read_errors','files','written_bytes','load_errors')})
            del llm
for u in sys.argv[1:]: go(u)
