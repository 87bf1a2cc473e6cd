#!/usr/bin/env python3
"""Trains a small hybrid of Qwen3.5's layout (Gated DeltaNet and attention) on texts, for tests of quantized states.

    tools/train_hybrid.py TEXTS FOLDER [--minutes 60]

TEXTS: a folder of .txt files; the last two by name are held out. FOLDER becomes a checkpoint of Hugging Face's layout
with its tokenizer. The learning rate follows the clock, so that the model is trained out when the minutes are over;
checkpoints before that are worth less. Needs torch and transformers (requirements/test.txt).
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

VOCAB = 512
CHARACTERS = 250_000  # of a text
END = "<|endoftext|>"


def tokenizer_of(texts):
    """A byte-level BPE of VOCAB tokens, END the first one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text[:200_000] for text in texts), trainer)
    return tokenizer


def encode(tokenizer, texts):
    parts = []
    for text in texts:
        lines = tokenizer.encode_batch_fast(text.removeprefix("\ufeff").splitlines(keepends=True))
        parts += [[0], *(line.ids for line in lines)]
    return np.concatenate([np.asarray(part, np.int16) for part in parts if part])


def config_of(context):
    return Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,  # three of Gated DeltaNet, then one of attention
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=128,  # as in the large models: a state's scale is that of 128 values
        linear_value_head_dim=128,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        dtype="float32",
    )


def causal_conv(hidden_states, weight, bias=None, activation=None, **kwargs):
    """The class's causal_conv1d_fn as sums of shifted rows: PyTorch's depthwise convolutions are slow on CPUs."""
    taps, length = weight.shape[-1], hidden_states.shape[-1]
    padded = functional.pad(hidden_states, (taps - 1, 0))
    total = sum(padded[..., tap : tap + length] * weight[:, tap, None] for tap in range(taps))
    return functional.silu(total)


def delta_rule(query, key, value, g, beta, chunk_size=64, **keywords):
    """Transformers' torch_chunk_gated_delta_rule for whole chunks and equal numbers of heads, without its copies."""
    batch, length, heads, width = value.shape
    shape = (batch * heads, length // chunk_size, chunk_size)

    def chunks(x):
        return x.transpose(1, 2).reshape(*shape, *x.shape[3:])

    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    q, k, v, b, total = chunks(query), chunks(key), chunks(value), chunks(beta)[..., None], chunks(g).cumsum(-1)
    decay = (total[..., None] - total[..., None, :]).tril().exp().tril()
    from_start, last = total.exp()[..., None], total[..., -1:]
    system = (b * k) @ k.transpose(-1, -2) * decay
    both = torch.linalg.solve_triangular(
        system, torch.cat((v, from_start * k), -1) * b, upper=False, unitriangular=True
    )
    new, known = both.split(width, -1)
    within = q @ k.transpose(-1, -2) * decay
    q, k, last = q * from_start, k * (last - total).exp()[..., None], last.exp()[..., None]
    state, out = q.new_zeros(batch * heads, key.shape[-1], width), []
    for i in range(shape[1]):
        change = new[:, i] - known[:, i] @ state
        out.append(q[:, i] @ state + within[:, i] @ change)
        state = state * last[:, i] + k[:, i].transpose(-1, -2) @ change
    result = torch.stack(out, 1).reshape(batch, heads, length, width).transpose(1, 2)
    return result * key.shape[-1] ** -0.5, None


def optimizers_of(model, rate):
    """Muon for the matrices of layers, AdamW for all else."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        layer_matrix = parameter.ndim == 2 and name.endswith("_proj.weight") and min(parameter.shape) > 8
        (matrices if layer_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def batches_of(tokens, context, batch, seed=0):
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(tokens) - context - 1, batch)
        yield torch.from_numpy(np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64))


def loss_of(model, ids):
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return functional.cross_entropy(model.lm_head(hidden).flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model, tokens, context, rows=16):
    model.eval()
    ids = torch.from_numpy(tokens[: rows * (context + 1)].astype(np.int64).reshape(rows, context + 1))
    loss = sum(loss_of(model, part).item() for part in ids.split(4)) / len(ids.split(4))
    model.train()
    return loss


def ngram_losses(tokens, held_out):
    """Loss in nats a token of interpolated n-grams (Witten-Bell) of orders 0, 1 and 2, trained on `tokens`."""

    def keys_of(ids, order):
        count = len(ids) - 2
        key = np.zeros(count, np.int64)
        for back in range(order, -1, -1):
            key = key * VOCAB + ids[2 - back : 2 - back + count]
        return key

    def look_up(table, keys):
        values, counts = table
        at = np.minimum(np.searchsorted(values, keys), len(values) - 1)
        return np.where(values[at] == keys, counts[at], 0)

    tokens, held_out = tokens.astype(np.int64), held_out.astype(np.int64)
    probability = np.full(len(held_out) - 2, 1 / VOCAB)
    losses = []
    for order in range(3):
        grams = np.unique(keys_of(tokens, order), return_counts=True)
        contexts, first, kinds = np.unique(grams[0] // VOCAB, return_index=True, return_counts=True)
        totals = np.add.reduceat(grams[1], first)
        keys = keys_of(held_out, order)
        kind, total = look_up((contexts, kinds), keys // VOCAB), look_up((contexts, totals), keys // VOCAB)
        seen = look_up(grams, keys)
        probability = np.where(total > 0, (seen + kind * probability) / np.maximum(total + kind, 1), probability)
        losses.append(float(-np.log(probability).mean()))
    return losses


def save(model, tokenizer, folder, facts):
    folder.mkdir(parents=True, exist_ok=True)
    half = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=half)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1) + "\n")
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def data_of(folder, cache):
    texts = [path.read_text(errors="replace")[:CHARACTERS] for path in sorted(folder.glob("*.txt"))]
    if len(texts) < 3:
        raise SystemExit(f"{folder} has {len(texts)} .txt files; at least 3 are needed, two of which are held out")
    if not (cache / "train.npy").exists():
        cache.mkdir(parents=True, exist_ok=True)
        tokenizer = tokenizer_of(texts[:-2])
        tokenizer.save(str(cache / "tokenizer.json"))
        np.save(cache / "train.npy", encode(tokenizer, texts[:-2]))
        np.save(cache / "held_out.npy", encode(tokenizer, texts[-2:]))
    tokenizer = Tokenizer.from_file(str(cache / "tokenizer.json"))
    return tokenizer, np.load(cache / "train.npy"), np.load(cache / "held_out.npy")


def train(arguments):
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    modeling_qwen3_5.causal_conv1d_fn = causal_conv
    modeling_qwen3_5.torch_chunk_gated_delta_rule = delta_rule
    tokenizer, tokens, held_out = data_of(arguments.texts, arguments.folder.with_name(arguments.folder.name + ".data"))
    ngrams = ngram_losses(tokens, held_out)
    model = Qwen3_5ForCausalLM(config_of(arguments.context))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # those of the class forget within a token, and training does not change that
                parameter.uniform_(0.002, 0.1).log_()
    facts = {"parameters": sum(parameter.numel() for parameter in model.parameters()), "ngram_losses": ngrams}
    print(facts, len(tokens), "tokens", flush=True)
    optimizers = optimizers_of(model, arguments.rate)
    start = saved = time.monotonic()
    limit = 60 * arguments.minutes
    for step, ids in enumerate(batches_of(tokens, arguments.context, arguments.batch)):
        now = time.monotonic()
        progress = min((now - start) / limit, 1)
        if progress >= 1 or now - saved > 300:
            facts |= {"steps": step, "tokens": step * arguments.batch * arguments.context}
            facts["held_out_loss"] = held_out_loss(model, held_out, arguments.context)
            save(model, tokenizer, arguments.folder, facts)
            print("saved", facts, flush=True)
            saved = time.monotonic()
        if progress >= 1:
            break
        # A warm-up of 40 steps, then along a cosine to a twentieth.
        rate = arguments.rate * min((step + 1) / 40, 1) * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            print(f"{step} {now - start:.0f} s: loss {loss.item():.3f}, {rate:.2e}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60, help="default 60")
    parser.add_argument("--context", type=int, default=512, help="tokens, default 512")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, default 8")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate, default 0.003")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
