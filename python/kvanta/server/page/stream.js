// Server-sent events of a completion, read from a fetch.

// Puts text together to the data of whole events.
export class EventReader {
  #rest = "";

  feed(text) {
    const blocks = (this.#rest + text).replace(/\r\n/g, "\n").split("\n\n");
    this.#rest = blocks.pop();
    return blocks
      .map((block) =>
        block
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).replace(/^ /, ""))
          .join("\n"),
      )
      .filter((data) => data !== "");
  }
}

// The message of an error in OpenAI's shape, or the beginning of another text.
export function errorMessage(status, text) {
  try {
    const { error, message } = JSON.parse(text);
    return error?.message ?? message ?? String(error ?? text);
  } catch {
    return text.slice(0, 200) || `the server answered with status ${status}`;
  }
}

// Posts `body` and calls take(chunk) for every chunk; throws an Error with the server's words.
export async function streamCompletion(url, body, { headers, signal, take }) {
  const response = await fetch(url, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw new Error(errorMessage(response.status, await response.text()));
  const events = new EventReader();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    for (const data of events.feed(value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(errorMessage(200, data));
      take(chunk);
    }
  }
}
