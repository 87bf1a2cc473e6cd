"""Makes models/stories260k from Andrej Karpathy's llama2.c checkpoint (MIT, see models/stories260k/LICENSE).

    python models/make_stories260k.py stories260K.bin tok512.bin models/stories260k

The two files come from https://huggingface.co/karpathy/tinyllamas/tree/main/stories260K. Their formats are those of
llama2.c's export.py (version 0) and tokenizer.py. Weights stay float32, bit for bit.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
from kvanta.gguf.safetensors_writer import write_safetensors
from kvanta.gguf.tokenizer import sentencepiece_bpe


def read_checkpoint(path):
    data = path.read_bytes()
    hidden, ffn, layers, heads, kv_heads, vocab, context = struct.unpack("7i", data[:28])
    assert vocab > 0, "a negative vocabulary means an output matrix of its own; this model's is tied"
    head_dim = hidden // heads
    values = np.frombuffer(data, dtype="<f4", offset=28)
    position = 0

    def take(*shape):
        nonlocal position
        count = int(np.prod(shape))
        position += count
        return values[position - count : position].reshape(shape)

    def rotate_halves(rows):
        # llama2.c rotates neighbours (2i, 2i+1) of a head; the Hugging Face layout rotates (i, i + head_dim/2).
        return rows.reshape(-1, head_dim // 2, 2, hidden).swapaxes(1, 2).reshape(rows.shape)

    embedding = take(vocab, hidden)
    input_norm = take(layers, hidden)
    q = take(layers, heads * head_dim, hidden)
    k = take(layers, kv_heads * head_dim, hidden)
    v = take(layers, kv_heads * head_dim, hidden)
    o = take(layers, hidden, heads * head_dim)
    ffn_norm = take(layers, hidden)
    gate = take(layers, ffn, hidden)
    down = take(layers, hidden, ffn)
    up = take(layers, ffn, hidden)
    final_norm = take(hidden)
    # What remains are llama2.c's rope tables: cos and sin, [context][head_dim / 2] each.
    assert len(values) - position == context * head_dim

    tensors = {"model.embed_tokens.weight": embedding}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = input_norm[layer]
        tensors[prefix + "self_attn.q_proj.weight"] = rotate_halves(q[layer])
        tensors[prefix + "self_attn.k_proj.weight"] = rotate_halves(k[layer])
        tensors[prefix + "self_attn.v_proj.weight"] = v[layer]
        tensors[prefix + "self_attn.o_proj.weight"] = o[layer]
        tensors[prefix + "post_attention_layernorm.weight"] = ffn_norm[layer]
        tensors[prefix + "mlp.gate_proj.weight"] = gate[layer]
        tensors[prefix + "mlp.down_proj.weight"] = down[layer]
        tensors[prefix + "mlp.up_proj.weight"] = up[layer]
    tensors["model.norm.weight"] = final_norm

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [1, 2],  # the checkpoint was trained on stories that are separated by <s>
        "torch_dtype": "float32",
    }
    return config, tensors


def read_tokenizer(path, vocab):
    data = path.read_bytes()
    position = 4  # the longest token's length
    tokens, scores = [], []
    for _ in range(vocab):
        score, length = struct.unpack_from("fi", data, position)
        tokens.append(data[position + 8 : position + 8 + length].decode())
        scores.append(score)
        position += 8 + length
    tokens[1:3] = ["<s>", "</s>"]  # llama2.c pads these two with line feeds, for printing
    kinds = [2, 3, 3] + [6] * 256 + [1] * (vocab - 259)
    tokens = [token.replace(" ", "\u2581") for token in tokens]
    return sentencepiece_bpe(tokens, kinds, scores, unknown_id=0, bos_id=1, add_space_prefix=True)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def main():
    checkpoint, tokenizer, folder = (Path(argument) for argument in sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = read_checkpoint(checkpoint)
    write_safetensors(
        folder / "model.safetensors", {name: t.shape for name, t in tensors.items()}, tensors.items(), dtype="F32"
    )
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": config["eos_token_id"]})
    write_json(folder / "tokenizer.json", read_tokenizer(tokenizer, config["vocab_size"]))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
        },
    )


if __name__ == "__main__":
    main()
