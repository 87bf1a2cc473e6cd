// Configurations of attention to rows that all heads share: latents, chosen tokens, compressed entries; and of streams
// of hidden states.
#pragma once

namespace kvanta::models {

// Multi-head latent attention (MLA): K and V of a token are one latent, from which every head's K and V are projected,
// and a rotated key that all heads share.
struct MlaConfig {
  int kv_lora_rank = 0;      // channels of a latent; 0: no MLA
  int q_lora_rank = 0;       // channels that queries are projected through; 0: projected at once
  int qk_nope_head_dim = 0;  // channels of a head's query and key without rotation
  int qk_rope_head_dim = 0;  // channels with rotation
  int v_head_dim = 0;        // channels of a head's value
  double latent_eps = 1e-6;  // epsilon of the latents' norms; transformers: the class's default in most models
  // False: layers without rope have qk_rope_head_dim further channels without rotation, which are projected as the
  // others are; else they have those of the key that all heads share, not rotated.
  bool keeps_rope_channels = true;
  bool rope_interleave = true;  // rotates the pairs (2 i, 2 i + 1); else (i, i + qk_rope_head_dim / 2)
  // Queries of a head at `position` are multiplied by s log(1 + position) + b, of the head's own s and b (Mistral Large
  // 4); so are those of indexers.
  bool log_query_scales = false;

  bool operator==(const MlaConfig&) const = default;
};

// Indexer of sparse attention (DeepSeek Sparse Attention, DSA): scores all tokens by keys of its own, which its heads
// share, and selects those that a layer attends to.
struct IndexerConfig {
  int topk = 0;                  // tokens of a query; 0: no indexer, attention to all tokens
  int heads = 0, head_dim = 0;   // the first channels of a head are rotated, MlaConfig::qk_rope_head_dim
  bool rope_interleave = false;  // as in MlaConfig
  bool norms_inputs = false;     // queries are projected from the layer's inputs, through a LayerNorm; else as its own

  bool operator==(const IndexerConfig&) const = default;
};

// Compressed keys and values (DeepSeek V4): K and V of a token are one row, which attention reads within a window; of
// the tokens before, layers read entries that a compressor makes of LayerSpec::row_tokens tokens each.
struct CompressionConfig {
  int rotary_dim = 0;                 // last channels of a row, which are rotated; 0: no such attention
  int o_groups = 0, o_lora_rank = 0;  // groups of heads whose outputs are projected to o_lora_rank channels each

  bool operator==(const CompressionConfig&) const = default;
};

// Hyper-connections: several streams of hidden states, which blocks read and write through weights of each row.
struct HyperConnectionConfig {
  int streams = 0;  // 0: hidden states are one stream
  int sinkhorn_iterations = 0;
  float eps = 0;

  bool operator==(const HyperConnectionConfig&) const = default;
};

}  // namespace kvanta::models
