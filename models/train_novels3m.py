"""Trains models/novels3m: a hybrid of Gated DeltaNet and attention in Qwen3.5's layout, for measuring codes of states.

    python models/train_novels3m.py models/novels3m --text NOVEL.txt ... [--minutes 60]

The texts are public domain novels (github.com/computationalstylistics/100_english_novels). A tokenizer (byte-level BPE
of 1,024 tokens) is trained first. Windows of 1,024 tokens are excerpts; in half of them a passage returns later, so
that the model learns to remember: a state that is stored badly costs accuracy. Needs torch, transformers and tokenizers
(requirements/oracle.txt).
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WINDOW = 1024
BATCH = 4
VOCABULARY = 1024
END = "<|endoftext|>"
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 160,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def train_tokenizer(texts: list[Path]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train([str(text) for text in texts[:8]], trainer)
    return tokenizer


def make_batch(tokens: np.ndarray, random: np.random.Generator) -> torch.Tensor:
    """Token ids, int64 [BATCH][WINDOW + 1]; in half of the windows a passage of 16 to 128 tokens returns."""
    rows = []
    for _ in range(BATCH):
        start = random.integers(len(tokens) - WINDOW - 1)
        row = tokens[start : start + WINDOW + 1].astype(np.int64)
        if random.random() < 0.5:
            length = random.integers(16, 128)
            source = random.integers(WINDOW - 2 * length)
            target = random.integers(source + length, WINDOW + 1 - length)
            row[target : target + length] = row[source : source + length]
        rows.append(row)
    return torch.from_numpy(np.stack(rows))


def train(model: transformers.PreTrainedModel, tokens: np.ndarray, minutes: float) -> float:
    """The mean loss of the last 50 steps, in nats a token. The learning rate follows a cosine over the time."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    random = np.random.default_rng(0)
    start = time.process_time()
    losses: list[float] = []
    while (share := (time.process_time() - start) / (60 * minutes)) < 1:
        rate = 3e-3 * min(1.0, (len(losses) + 1) / 100) * (0.02 + 0.98 * (1 + math.cos(math.pi * share)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = make_batch(tokens, random)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 50 == 0:
            print(f"{len(losses)} steps, {share:.0%} of the time, loss {np.mean(losses[-50:]):.3f}", flush=True)
    return float(np.mean(losses[-50:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--minutes", type=float, default=60.0, help="processor time, of all threads")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = train_tokenizer(arguments.text)
    texts = [" ".join(text.read_text(encoding="utf-8").split()) for text in arguments.text]
    tokens = np.concatenate([np.array([*tokenizer.encode(text).ids, 0], dtype=np.uint16) for text in texts])
    print(f"{len(tokens)} tokens")
    config = transformers.Qwen3_5TextConfig(**CONFIG)
    config._attn_implementation = "sdpa"
    model = transformers.Qwen3_5ForCausalLM(config)
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters")
    loss = train(model, tokens, arguments.minutes)
    model.to(torch.bfloat16).save_pretrained(arguments.folder)
    tokenizer.save(str(arguments.folder / "tokenizer.json"))
    details = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 32768}
    (arguments.folder / "tokenizer_config.json").write_text(json.dumps(details, indent=1) + "\n")
    print(f"loss of the last steps: {loss:.3f}")


if __name__ == "__main__":
    main()
