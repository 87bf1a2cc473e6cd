"""Tolerances of the Python tests, each with its derivation."""

from __future__ import annotations

from math import sqrt

from kvanta import attention

# True if the best unit of this CPU rounds operands of bf16 and fp8 caches to bf16 (ADR 0067).
HAS_BF16_OPERANDS = attention.backends()[0] == "cpu-zen4"
# A unit that does not.
EXACT_ISA = "avx512" if HAS_BF16_OPERANDS else "auto"

# Logits in float32 against transformers in float32, as max |difference| / max |logit|. Sums of up to a few hundred
# terms in another order differ by about sqrt(n) * 2^-24 = 1e-6 each; a chain of a dozen, with softmax and SiLU between
# them, stays below 1e-5. Measured: up to 4e-6. Any wrong constant shows at 1e-3 or more.
F32_LOGITS = 1e-4

# Mean KL divergence to transformers' distributions, both in float32, in nats: half the variance of the logits'
# differences, (1e-5)^2 / 2 at logits of a few units. Measured: up to 1e-10.
F32_DIVERGENCE = 1e-9


# Mean KL divergence of a GPU from the CPU with f16 or quantized weights: the CPU multiplies the same weights by
# activations in f32, the GPU by 11 bits of them, which err by up to 2^-12 of the value. Measured on random tiny models:
# 5e-6 to 2e-5, for quantized weights as for the same values in f16. A wrong scale or code gives 1e-2 or more.
ACTIVATIONS_OF_11_BITS = 1e-4


# Logits with 16-bit weights and cache: the bound is the error of rounding, measured in the same test by rounding in
# transformers in the same places (inputs of linear layers, K, V). Both are sums over the same thousands of rounding
# errors, so their rms differs little. Measured: by less than 1 %.
ROUNDING_ERROR_RATIO = 1.1
# bf16 operands: queries and probabilities are rounded in addition to K and V, so twice as many roundings at most.
# Measured: up to 1.18.
BF16_ROUNDING_RATIO = ROUNDING_ERROR_RATIO * sqrt(2 if HAS_BF16_OPERANDS else 1)

# ROUNDING_ERROR_RATIO for latents: transformers rounds keys and values, the engine rounds the latent from which both
# are computed, and the rotated channels. Errors of the same size in other places: their rms differs by chance.
# Measured: up to 1.14.
LATENT_ROUNDING_RATIO = 1.5

# Distance to those rounded logits in units of the rounding error; independent roundings would give sqrt(2). f32 noise
# (1e-6 relative) moves 1e-6 / 2^-8 = 3e-4 of the bf16 values across a rounding boundary, and each flip moves more of
# them in the next layer: scaling the weights by 1 + 1e-7 in transformers itself gives up to 0.63 (Qwen3, whose q and k
# are normed to unit size). fp16 rounds only K and V, and does not cascade: measured 0.07.
# Operands of bf16 add independent roundings: sqrt(2), measured 1.17.
ROUNDED_SHARE = {"bf16": 1.1 * sqrt(2) if HAS_BF16_OPERANDS else 0.9, "fp16": 0.2}

# Attention compared with the reference on the same bytes, as a share of the largest output: ten times the error of
# 16-bit operands, of bf16 ones, which bf16 and fp8 have on some units, and of the 8-bit operands of sub-byte codes
# (tests/tolerance.h derives the bounds).
ATTENTION = 1e-3
BF16_OPERANDS_ATTENTION = 2e-2
# Backends with such operands, or with those of fp16 and sums of 32 products in it (ADR 0070), which err less.
NARROW_OPERANDS = {"cpu-zen4": ("bf16", "fp8"), "cpu-avx512fp16": ("fp8",)}
BF16_ATTENTION = BF16_OPERANDS_ATTENTION if HAS_BF16_OPERANDS else ATTENTION
NARROW_ATTENTION = 5e-2
