"""FlashInfer's attention kernels for benchmarks/gpu_peers.py."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
from gpu_peer_bench import (
    DEVICE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Bench,
    Problem,
    attend,
    attend_causal,
    decode,
    normal,
    prefill,
)

MLA_HEADS, MLA_RANK, MLA_ROPE = 128, 512, 64


@functools.cache
def workspace() -> torch.Tensor:
    return torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)


@functools.cache
def zeroed_workspace() -> torch.Tensor:
    """Workspace of XQA, whose semaphores must be zero before the first launch (launches restore them)."""
    return torch.zeros(512 << 20, dtype=torch.uint8, device=DEVICE)


class PageTable:
    """Page tables of `batch` sequences of `context` tokens, whose pages lie in random order in the pool."""

    def __init__(self, batch: int, context: int, page_size: int) -> None:
        self.context, self.page_size = context, page_size
        per_sequence = -(-context // page_size)
        self.pages = batch * per_sequence
        self.indices = torch.randperm(self.pages, device=DEVICE).int()
        self.table = self.indices.view(batch, per_sequence)
        self.indptr = torch.arange(batch + 1, dtype=torch.int32) * per_sequence  # on the host, where plan() reads it
        self.last_page_len = torch.full((batch,), (context - 1) % page_size + 1, dtype=torch.int32)
        self.lengths = torch.full((batch,), context, dtype=torch.int32)

    def gather(self, pool: torch.Tensor) -> torch.Tensor:
        """[pages, page size, ...] as [batch, context, ...]."""
        return pool[self.table.long()].flatten(1, 2)[:, : self.context]


def fp8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


def flashinfer_decode(
    page_size: int, kv_type: torch.dtype, backend: str, tensor_cores: bool = True, q_type: torch.dtype = torch.bfloat16
) -> Callable[[int, int], Problem]:
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    def build(batch: int, context: int) -> Problem:
        pages = PageTable(batch, context, page_size)
        q = normal(batch, HEADS, HEAD_DIM).to(q_type)
        k, v = (normal(pages.pages, page_size, KV_HEADS, HEAD_DIM).to(kv_type) for _ in range(2))
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=tensor_cores, backend=backend)
        wrapper.plan(
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            page_size,
            q_data_type=q_type,
            kv_data_type=kv_type,
            o_data_type=torch.bfloat16,
        )
        scales = [torch.ones(heads, device=DEVICE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        arguments = scales if q_type == torch.float8_e4m3fn else []
        out = torch.empty(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        return Problem(
            lambda: wrapper.run(q, (k, v), *arguments, out=out),
            lambda: attend(q, pages.gather(k), pages.gather(v)),
            batch * context * 2 * KV_HEADS * HEAD_DIM * kv_type.itemsize,
        )

    return build


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nvfp4_cache(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantized normal values: codes [..., dim / 2], low nibble first, and e4m3 scales [..., dim / 16]."""
    edges = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1)], device=DEVICE, dtype=torch.bfloat16)
    codes = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device=DEVICE)
    scales = torch.empty(*shape[:-1], shape[-1] // 16, dtype=torch.float8_e4m3fn, device=DEVICE)
    for begin in range(0, shape[0], 4096):
        part = slice(begin, min(begin + 4096, shape[0]))
        x = normal(part.stop - begin, *shape[1:-1], shape[-1] // 16, 16)
        scale = fp8(x.abs().amax(-1) / 6)
        x /= scale.to(torch.bfloat16).unsqueeze(-1)
        code = torch.bucketize(x.abs(), edges, out_int32=True).to(torch.uint8) | (x < 0).to(torch.uint8) << 3
        code = code.flatten(-2)
        codes[part] = code[..., 0::2] | code[..., 1::2] << 4
        scales[part] = scale
    return codes, scales


def nvfp4_decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(E2M1 + [-x for x in E2M1], device=DEVICE)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return values[nibbles.long()] * scales.float().repeat_interleave(16, -1)


def flashinfer_nvfp4(page_size: int) -> Callable[[int, int], Problem]:
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    def build(batch: int, context: int) -> Problem:
        pages = PageTable(batch, context, page_size)
        q = normal(batch, HEADS, HEAD_DIM)
        (k, k_scale), (v, v_scale) = (nvfp4_cache(pages.pages, page_size, KV_HEADS, HEAD_DIM) for _ in range(2))
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", use_tensor_cores=True, backend="fa2")
        wrapper.plan(
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            page_size,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.uint8,
            o_data_type=torch.bfloat16,
        )
        out = torch.empty_like(q)
        return Problem(
            lambda: wrapper.run(q, (k, v), kv_cache_sf=(k_scale, v_scale), out=out),
            lambda: attend(
                q,
                nvfp4_decode(pages.gather(k), pages.gather(k_scale)),
                nvfp4_decode(pages.gather(v), pages.gather(v_scale)),
            ),
            batch * context * 2 * KV_HEADS * (HEAD_DIM // 2 + HEAD_DIM // 16),
        )

    return build


def flashinfer_xqa(page_size: int, kv_type: torch.dtype) -> Callable[[int, int], Problem]:
    """TensorRT-LLM's XQA kernel; with FP8 KV its Hopper kernel rounds the query and the probabilities to FP8."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    def build(batch: int, context: int) -> Problem:
        pages = PageTable(batch, context, page_size)
        q = normal(batch, HEADS, HEAD_DIM)
        k, v = (normal(pages.pages, page_size, KV_HEADS, HEAD_DIM).to(kv_type) for _ in range(2))
        lengths, out = pages.lengths.to(DEVICE), torch.empty_like(q)
        return Problem(
            lambda: xqa_batch_decode_with_kv_cache(
                q,
                (k, v),
                zeroed_workspace(),
                pages.table,
                lengths,
                context,
                bmm1_scale=1 / math.sqrt(HEAD_DIM),
                bmm2_scale=1.0,
                out=out,
                kv_layout="NHD",
            ),
            lambda: attend(q, pages.gather(k), pages.gather(v)),
            batch * context * 2 * KV_HEADS * HEAD_DIM * kv_type.itemsize,
        )

    return build


def flashinfer_mla(page_size: int, backend: str, kv_type: torch.dtype) -> Callable[[int, int], Problem]:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    def build(batch: int, context: int) -> Problem:
        pages = PageTable(batch, context, page_size)
        q, q_rope = normal(batch, MLA_HEADS, MLA_RANK), normal(batch, MLA_HEADS, MLA_ROPE)
        kv, k_rope = (normal(pages.pages, page_size, dim).to(kv_type) for dim in (MLA_RANK, MLA_ROPE))
        wrapper = BatchMLAPagedAttentionWrapper(workspace(), backend=backend)
        metadata = MLAPlanMetadata.csr(
            torch.arange(batch + 1, dtype=torch.int32), pages.indptr, pages.indices, pages.lengths
        )
        scale = 1 / math.sqrt(192)
        wrapper.plan(
            metadata=metadata,
            num_heads=MLA_HEADS,
            head_dim_ckv=MLA_RANK,
            head_dim_kpe=MLA_ROPE,
            page_size=page_size,
            causal=False,
            sm_scale=scale,
            q_data_type=torch.bfloat16,
            kv_data_type=kv_type,
            query_layout="split",
            kv_cache_layout="split",
        )
        scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if kv_type.itemsize == 1 else {}
        out = torch.empty_like(q)

        def reference() -> torch.Tensor:
            values = pages.gather(kv).float()
            keys = torch.cat((values, pages.gather(k_rope).float()), -1)
            return attend(torch.cat((q, q_rope), -1), keys.unsqueeze(2), values.unsqueeze(2), scale)

        tokens = batch * context
        return Problem(
            lambda: wrapper.run(query=(q, q_rope), kv_cache=(kv, k_rope), out=out, **scales),
            reference,
            tokens * (MLA_RANK + MLA_ROPE) * kv_type.itemsize,
            2.0 * tokens * MLA_HEADS * (2 * MLA_RANK + MLA_ROPE),
        )

    return build


def flashinfer_prefill(page_size: int, backend: str, data_type: torch.dtype) -> Callable[[int, int], Problem]:
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    def build(tokens: int, depth: int) -> Problem:
        pages = PageTable(1, tokens + depth, page_size)
        q = normal(tokens, HEADS, HEAD_DIM).to(data_type)
        k, v = (normal(pages.pages, page_size, KV_HEADS, HEAD_DIM).to(data_type) for _ in range(2))
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend=backend)
        wrapper.plan(
            torch.tensor([0, tokens], dtype=torch.int32),
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            page_size,
            causal=True,
            q_data_type=data_type,
            kv_data_type=data_type,
            o_data_type=torch.bfloat16,
        )
        scales = [torch.ones(heads, device=DEVICE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        arguments = scales if data_type == torch.float8_e4m3fn else []
        out = torch.empty(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        return Problem(
            lambda: wrapper.run(q, (k, v), *arguments, out=out),
            lambda: attend_causal(q, pages.gather(k)[0], pages.gather(v)[0]),
            0,
        )

    return build


def flashinfer(bench: Bench) -> None:
    bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    for page in (16, 64):
        decode(bench, f"flashinfer-fa2 bf16 page {page}", partial(flashinfer_decode, page, bf16, "fa2"), 0.01)
        decode(
            bench,
            f"flashinfer-cuda-core bf16 page {page}",
            partial(flashinfer_decode, page, bf16, "fa2", tensor_cores=False),
            0.01,
        )
        decode(bench, f"flashinfer-fa2 fp8 page {page}", partial(flashinfer_decode, page, e4m3, "fa2"), 0.01)
        decode(
            bench,
            f"flashinfer-cuda-core fp8 page {page}",
            partial(flashinfer_decode, page, e4m3, "fa2", tensor_cores=False),
            0.01,
        )
    for page in (16, 64):
        decode(bench, f"flashinfer-fa2 nvfp4 page {page}", partial(flashinfer_nvfp4, page), 0.01)
    for backend in ("fa2", "fa3"):
        prefill(
            bench, f"flashinfer-{backend}-prefill bf16 page 64", partial(flashinfer_prefill, 64, backend, bf16), 0.01
        )
    for backend in ("fa3", "fa2"):
        decode(bench, f"flashinfer-mla-{backend} bf16 page 64", partial(flashinfer_mla, 64, backend, bf16), 0.01)
    for page in (16, 64):
        decode(bench, f"flashinfer-xqa fp8 page {page}", partial(flashinfer_xqa, page, e4m3), 0.1)
        decode(bench, f"flashinfer-xqa bf16 page {page}", partial(flashinfer_xqa, page, bf16), 0.01)
    for page in (16, 64):
        decode(bench, f"flashinfer-fa3 bf16 page {page}", partial(flashinfer_decode, page, bf16, "fa3"), 0.01)
    decode(bench, "flashinfer-mla-fa3 fp8 page 64", partial(flashinfer_mla, 64, "fa3", e4m3), 0.1)
    decode(bench, "flashinfer-fa3 fp8 q+kv page 64", partial(flashinfer_decode, 64, e4m3, "fa3", q_type=e4m3), 0.1)
    prefill(bench, "flashinfer-fa3-prefill fp8 page 64", partial(flashinfer_prefill, 64, "fa3", e4m3), 0.1)
