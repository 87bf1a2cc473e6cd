// The page: the server's name and health, charts of its metrics, and the chat.

import { Chart } from "./chart.js";
import { Chat } from "./chat.js";
import { budget, parseMetrics, readings } from "./metrics.js";

const PERIOD_MS = 2000;
const CHARTS = {
  throughput: { title: "Throughput", unit: "tokens/s", least: 1 },
  requests: { title: "Requests", least: 1 },
  cache: { title: "Cache in use, by format", unit: "MiB", stacked: true },
  prefix: { title: "Prompt tokens found in the prefix cache", unit: "%", least: 100 },
  tiers: { title: "Prompt tokens by where they came from", unit: "tokens/s", stacked: true, optional: true },
  disk: { title: "Cache on disk, by format", unit: "MiB", stacked: true, optional: true },
  traffic: { title: "Traffic of RAM, disk and store", unit: "MiB/s", optional: true },
  faults: { title: "Faults of RAM, disk and store since the start", optional: true },
  first: { title: "Time to first token", unit: "ms" },
  next: { title: "Time between tokens", unit: "ms" },
  divergence: { title: "Divergence from the exact cache, sampled", unit: "nats", optional: true },
  zeros: { title: "Blocks whose values are all zero", unit: "%", optional: true },
  clipped: { title: "Values clipped by the format", unit: "per million", least: 1 },
};

const $ = (id) => document.getElementById(id);
let [model, format] = ["", ""];
let looked = null; // {metrics, at} of the last look

function headers() {
  const key = $("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function read(url) {
  const response = await fetch(url, { headers: headers(), cache: "no-store" });
  if (response.status === 401) throw new Error("the server wants an API key");
  if (!response.ok) throw new Error(`${url} answers with status ${response.status}`);
  return response;
}

function say(text, up) {
  $("trouble").textContent = text;
  $("health").className = up ? "dot up" : "dot down";
  $("health").setAttribute("aria-label", up ? "the server answers" : text);
}

async function look(charts) {
  if (!model) {
    const { data } = await (await read("v1/models")).json();
    model = data[0].id;
    format = data[0].kv_cache_dtype ?? "";
    $("model").textContent = model;
    document.title = `${model} – Kvanta`;
  }
  const metrics = parseMetrics(await (await read("metrics")).text());
  const at = performance.now();
  const size = budget(metrics);
  $("facts").textContent = [format && `cache ${format}`, size && `budget ${Math.round(size).toLocaleString("en")} MiB`]
    .filter(Boolean)
    .join(" · ");
  if (looked) {
    const shown = readings(looked.metrics, metrics, (at - looked.at) / 1000, format);
    for (const [name, values] of Object.entries(shown)) charts[name].push(values);
  }
  looked = { metrics, at };
}

async function keepLooking(charts) {
  for (;;) {
    if (!document.hidden) {
      try {
        await look(charts);
        say("", true);
      } catch (error) {
        say(error instanceof TypeError ? "the server does not answer" : error.message, false);
      }
    }
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
}

$("key").value = sessionStorage.getItem("kvanta-key") ?? "";
$("key").addEventListener("change", () => sessionStorage.setItem("kvanta-key", $("key").value.trim()));
new Chat({ model: () => model, headers });
keepLooking(
  Object.fromEntries(Object.entries(CHARTS).map(([name, options]) => [name, new Chart($("charts"), { ...options, period: PERIOD_MS / 1000 })])),
);
