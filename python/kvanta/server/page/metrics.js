// The server's /metrics in Prometheus' text format, and the readings that the charts show.

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// Text to Map: name -> [{labels, value}]; lines that are no samples say nothing.
export function parseMetrics(text) {
  const metrics = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!found) continue;
    const value = found[3] === "+Inf" ? Infinity : Number(found[3]);
    if (Number.isNaN(value)) continue;
    const labels = {};
    for (const [, name, quoted] of (found[2] ?? "").matchAll(LABEL)) {
      labels[name] = quoted.replace(/\\(.)/g, (_, character) => (character === "n" ? "\n" : character));
    }
    if (!metrics.has(found[1])) metrics.set(found[1], []);
    metrics.get(found[1]).push({ labels, value });
  }
  return metrics;
}

// The sum over all labels, or null where the server has no such metric.
export function total(metrics, name) {
  const samples = metrics.get(name);
  return samples ? samples.reduce((sum, sample) => sum + sample.value, 0) : null;
}

// Sums by the value of one label, in the order in which they come.
export function byLabel(metrics, name, label) {
  const sums = {};
  for (const sample of metrics.get(name) ?? []) {
    const key = sample.labels[label] ?? "";
    sums[key] = (sums[key] ?? 0) + sample.value;
  }
  return sums;
}

// Increase of a counter between two scrapes; null if the server lacks it, 0 after a restart.
export function gained(before, now, name) {
  const to = total(now, name);
  return to === null ? null : Math.max(0, to - (total(before, name) ?? 0));
}

// Quantile of a histogram's increase, by linear interpolation inside a bucket; null without an increase.
export function gainedQuantile(before, now, name, quantile) {
  const earlier = byLabel(before, `${name}_bucket`, "le");
  const buckets = Object.entries(byLabel(now, `${name}_bucket`, "le"))
    .map(([edge, count]) => [edge === "+Inf" ? Infinity : Number(edge), count - (earlier[edge] ?? 0)])
    .sort((a, b) => a[0] - b[0]);
  const count = buckets.length ? buckets[buckets.length - 1][1] : 0;
  if (!(count > 0)) return null;
  const rank = quantile * count;
  let [low, below] = [0, 0];
  for (const [edge, upTo] of buckets) {
    if (upTo >= rank) {
      return edge === Infinity ? low : low + ((edge - low) * (rank - below)) / Math.max(upTo - below, 1e-9);
    }
    [low, below] = [edge, upTo];
  }
  return low;
}

// Mean of a histogram's increase; null without one.
export function gainedMean(before, now, name) {
  const [sum, count] = [gained(before, now, `${name}_sum`), gained(before, now, `${name}_count`)];
  return count > 0 && sum !== null ? sum / count : null;
}

function share(part, whole) {
  return part === null || !(whole > 0) ? null : (100 * part) / whole;
}

function scaled(value, factor) {
  return value === null ? null : value * factor;
}

// Values of each chart after `seconds`: chart -> series -> value, or null. format: the cache's.
export function readings(before, now, seconds, format = "this format") {
  const rate = (name) => scaled(gained(before, now, name), 1 / seconds);
  const gainedAs = (name) => gained(before, now, `kvanta:${name}`);
  const milliseconds = (name, quantile) => scaled(gainedQuantile(before, now, `kvanta:${name}`, quantile), 1000);
  return {
    throughput: {
      "answers": rate("kvanta:generation_tokens_total"),
      "prompts": rate("kvanta:prompt_tokens_total"),
    },
    requests: {
      "running": total(now, "kvanta:num_requests_running"),
      "waiting": total(now, "kvanta:num_requests_waiting"),
    },
    cache: cacheBytes(now),
    ...tierReadings(before, now, seconds, format),
    prefix: { "hit": share(gainedAs("prefix_cache_hits_total"), gainedAs("prefix_cache_queries_total")) },
    first: {
      "median": milliseconds("time_to_first_token_seconds", 0.5),
      "99 %": milliseconds("time_to_first_token_seconds", 0.99),
    },
    next: {
      "median": milliseconds("inter_token_latency_seconds", 0.5),
      "99 %": milliseconds("inter_token_latency_seconds", 0.99),
      "largest, lately": scaled(total(now, "kvanta:inter_token_latency_max_seconds"), 1000) || null,
    },
    divergence: {
      "lately": gainedMean(before, now, "kvanta:sampled_kl_divergence_nats"),
      "so far": gainedMean(new Map(), now, "kvanta:sampled_kl_divergence_nats"),
    },
    clipped: { "values": scaled(share(gainedAs("kv_saturated_values_total"), gainedAs("kv_values_total")), 1e4) },
    zeros: { "blocks": share(gainedAs("kv_zero_blocks_total"), gainedAs("kv_blocks_total")) },
  };
}

// Tiers of the prefix cache below the memory, the nearest first. Faults: what is counted, by metrics that are added up.
const TIERS = {
  host: {
    hits: "kvanta:host_cache_hits_total",
    read: "kvanta:host_cache_read_bytes_total",
    written: "kvanta:host_cache_written_bytes_total",
    faults: {
      "errors": ["kvanta:host_cache_read_errors_total", "kvanta:host_cache_write_errors_total"],
      "not written": ["kvanta:host_cache_dropped_total"],
    },
  },
  disk: {
    hits: "kvanta:disk_cache_hits_total",
    read: "kvanta:disk_cache_read_bytes_total",
    written: "kvanta:disk_cache_written_bytes_total",
    faults: {
      "errors": ["kvanta:disk_cache_read_errors_total", "kvanta:disk_cache_write_errors_total"],
      "damaged": ["kvanta:disk_cache_damaged_files_total"],
      "not written": ["kvanta:disk_cache_dropped_total"],
    },
  },
  store: {
    hits: "kvanta:store_cache_hits_total",
    read: "kvanta:store_cache_read_bytes_total",
    written: "kvanta:store_cache_written_bytes_total",
    faults: {
      "errors": ["kvanta:store_cache_read_errors_total", "kvanta:store_cache_write_errors_total"],
      "damaged": ["kvanta:store_cache_damaged_records_total"],
      "not written": ["kvanta:store_cache_dropped_total"],
    },
  },
};

// Charts of the tiers that the server has; without any, all values are null.
function tierReadings(before, now, seconds, format) {
  const rate = (name, unit = 1) => scaled(gained(before, now, name), 1 / seconds / unit);
  const mebibytes = (name) => scaled(total(now, name), 2 ** -20);
  const hits = {};
  const [traffic, faults] = [{}, {}];
  for (const [tier, metrics] of Object.entries(TIERS)) {
    const read = rate(metrics.hits);
    if (read === null) continue;
    hits[tier] = read;
    for (const way of ["read", "written"]) traffic[`${tier}: ${way}`] = rate(metrics[way], 2 ** 20);
    for (const [fault, names] of Object.entries(metrics.faults)) {
      faults[`${tier}: ${fault}`] = names.reduce((sum, name) => sum + (total(now, name) ?? 0), 0);
    }
  }
  const here = (value) => (Object.keys(hits).length ? Math.max(0, value) : null);
  const cached = rate("kvanta:prompt_tokens_cached_total");
  const read = Object.values(hits).reduce((sum, each) => sum + each, 0);
  const [own, all] = [mebibytes("kvanta:disk_cache_own_bytes"), mebibytes("kvanta:disk_cache_used_bytes")];
  return {
    tiers: {
      "memory": here(cached - read),
      ...hits,
      "computed": here(rate("kvanta:prompt_tokens_total") - cached),
    },
    disk: { [format || "this format"]: own, "others": own === null ? null : Math.max(0, all - own) },
    traffic,
    faults,
  };
}

// MiB in use by format.
function cacheBytes(now) {
  const bytes = byLabel(now, "kvanta:kv_cache_used_bytes", "format");
  return Object.fromEntries(Object.entries(bytes).map(([format, count]) => [format, count / 2 ** 20]));
}

// The budget of the cache in MiB, or null.
export function budget(metrics) {
  return scaled(total(metrics, "kvanta:kv_cache_budget_bytes"), 2 ** -20);
}
