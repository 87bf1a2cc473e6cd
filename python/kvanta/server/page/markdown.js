// Markdown of answers as elements of the page: headings, lists, code, bold. Text is only ever text, never HTML.

const BLOCK = /^(#{1,6}) +(.*)$|^\s*(?:[-*+]|(\d{1,3})[.)]) +(.*)$/;
const SPAN = /`([^`\n]+)`|\*\*(\S(?:[^\n]*?\S)?)\*\*/g;

// A list of blocks: {tag: "pre" | "h3" | "ul" | "ol" | "p", text or items}.
export function parseMarkdown(text) {
  const blocks = [];
  let fence = null;
  for (const line of text.split("\n")) {
    const last = blocks[blocks.length - 1];
    const mark = /^\s*(```|~~~)/.exec(line)?.[1];
    if (fence) {
      if (mark === fence) fence = null;
      else last.lines.push(line);
      continue;
    }
    if (mark) {
      fence = mark;
      blocks.push({ tag: "pre", lines: [] });
      continue;
    }
    const [, heading, title, number, entry] = BLOCK.exec(line) ?? [];
    if (heading) blocks.push({ tag: "h3", lines: [title] });
    else if (entry !== undefined) {
      const tag = number === undefined ? "ul" : "ol";
      if (last?.tag === tag) last.lines.push(entry);
      else blocks.push({ tag, lines: [entry], start: number });
    } else if (!line.trim()) blocks.push({ tag: "end", lines: [] });
    else if (last?.tag === "p") last.lines.push(line);
    else blocks.push({ tag: "p", lines: [line] });
  }
  return blocks.filter((block) => block.tag !== "end");
}

// Parts of a line: [tag or "", text].
export function parseSpans(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(SPAN)) {
    if (match.index > end) parts.push(["", text.slice(end, match.index)]);
    parts.push(match[1] === undefined ? ["strong", match[2]] : ["code", match[1]]);
    end = match.index + match[0].length;
  }
  if (end < text.length) parts.push(["", text.slice(end)]);
  return parts;
}

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

const spans = (text) => parseSpans(text).map(([tag, part]) => (tag ? element(tag, part) : part));

// Elements for a text.
export function renderMarkdown(text) {
  return parseMarkdown(text).map(({ tag, lines, start }) => {
    if (tag === "pre") return element("pre", element("code", lines.join("\n")));
    if (tag === "p" || tag === "h3") return element(tag, ...spans(lines.join("\n")));
    const list = element(tag, ...lines.map((line) => element("li", ...spans(line))));
    if (start !== undefined) list.setAttribute("start", start);
    return list;
  });
}
