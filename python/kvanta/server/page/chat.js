// The chat: messages, the form, one answer at a time.

import { renderMarkdown } from "./markdown.js";
import { streamCompletion } from "./stream.js";

const $ = (id) => document.getElementById(id);

export class Chat {
  #said = [];
  #stop = null;

  // model(): the model's name; headers(): those of every request.
  constructor({ model, headers }) {
    Object.assign(this, { model, headers });
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#stop) this.#stop.abort();
      else this.#ask();
    });
    $("text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.#stop) this.#ask();
      }
    });
    $("clear").addEventListener("click", () => {
      this.#stop?.abort();
      this.#said = [];
      $("messages").replaceChildren();
      $("text").focus();
    });
  }

  #show(role, text) {
    const message = document.createElement("div");
    message.className = `message ${role}`;
    const body = document.createElement("div");
    body.textContent = text;
    message.append(body);
    $("messages").append(message);
    this.#follow();
    return { message, body };
  }

  #follow() {
    $("messages").scrollTop = $("messages").scrollHeight;
  }

  #messages() {
    const system = $("system").value.trim();
    return system ? [{ role: "system", content: system }, ...this.#said] : this.#said;
  }

  #request(text) {
    const common = {
      model: this.model(),
      max_tokens: Math.max(1, Number($("tokens").value) || 256),
      temperature: Math.max(0, Number($("temperature").value) || 0),
    };
    if ($("mode").value === "text") return ["v1/completions", { ...common, prompt: text }];
    return ["v1/chat/completions", { ...common, messages: this.#messages() }];
  }

  async #ask() {
    const text = $("text").value;
    if (!text.trim()) return;
    $("text").value = "";
    const said = this.#said;
    const plain = $("mode").value === "text"; // no Markdown in a text that is continued
    said.push({ role: "user", content: text });
    this.#show("user", text);
    const { message, body } = this.#show("assistant", "");
    const note = document.createElement("span");
    note.className = "note";
    message.append(note);
    body.className = "answer waiting";
    this.#stop = new AbortController();
    $("send").textContent = "Stop";
    const began = performance.now();
    let [first, usage, answer] = [null, null, ""];
    try {
      const [url, request] = this.#request(text);
      await streamCompletion(url, request, {
        headers: this.headers(),
        signal: this.#stop.signal,
        take: (chunk) => {
          const choice = chunk.choices?.[0];
          const piece = choice?.delta?.content ?? choice?.text ?? "";
          if (piece) first ??= performance.now();
          usage = chunk.usage ?? usage;
          answer += piece;
          if (plain) body.textContent = answer;
          else body.replaceChildren(...renderMarkdown(answer));
          this.#follow();
        },
      });
      note.textContent = figures(usage, began, first, performance.now());
    } catch (error) {
      const stopped = error.name === "AbortError";
      note.textContent = stopped ? "stopped" : error.message;
      if (!stopped) message.classList.add("failed");
    }
    body.className = plain ? "answer plain" : "answer";
    // A question without an answer would make the next one fail, or be answered in its stead.
    if (answer) said.push({ role: "assistant", content: answer });
    else said.pop();
    this.#stop = null;
    $("send").textContent = "Send";
    this.#follow();
  }
}

// Cost of an answer. Times in milliseconds.
export function figures(usage, began, first, ended) {
  if (!usage) return "";
  const parts = [`${usage.completion_tokens} tokens`];
  if (first !== null) {
    const seconds = (ended - first) / 1000;
    if (usage.completion_tokens > 1 && seconds > 0) {
      parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} per second`);
    }
    parts.push(`first after ${Math.round(first - began)} ms`);
  }
  const cached = usage.prompt_tokens_details?.cached_tokens;
  if (cached !== undefined && cached !== null) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens from the cache`);
  return parts.join(" · ");
}
