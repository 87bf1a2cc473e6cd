// A line or area chart of the last minutes, in SVG, with a scale, a time axis, and its newest values in words below it.

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [300, 100];
const [MIN_POINTS, MAX_POINTS] = [30, 150]; // across the whole width
const SERIES = 6; // colors in the style sheet

// A value in about three digits, a dash where there is none.
export function show(value, unit) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const digits = size >= 100 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 };
  const text = value.toLocaleString("en", digits);
  return unit ? `${text} ${unit}` : text;
}

// The next 1, 2 or 5 times a power of ten.
export function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((edge) => edge >= value * 0.999);
}

function element(name, attributes = {}) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function item(text) {
  const made = document.createElement("li");
  made.textContent = text;
  return made;
}

// A time before now, as the time axis has it.
export function ago(seconds) {
  return seconds < 90 ? `−${Math.round(seconds)} s` : `−${show(seconds / 60, "min")}`;
}

// Paths of one series: a line through neighbouring points, and a dot, which is a line without length, for a point alone.
export function linePaths(points) {
  let [lines, dots] = ["", ""];
  points.forEach((point, index) => {
    if (point === null) return;
    const [before, after] = [points[index - 1] ?? null, points[index + 1] ?? null];
    lines += `${before === null ? "M" : "L"}${point}`;
    if (before === null && after === null) dots += `M${point}h0`;
  });
  return { lines, dots };
}

export class Chart {
  // title, unit; stacked: areas on top of each other; least: the smallest top of the axis; optional: hidden while it has
  // nothing to show; period: seconds between points.
  constructor(parent, { title, unit = "", stacked = false, least = 0, optional = false, period = 2 }) {
    Object.assign(this, { title, unit, stacked, least, period, points: [], names: [] });
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = unit ? `${title} (${unit})` : title;
    this.svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    [this.scale, this.times, this.legend] = ["scale", "times", "legend"].map((name) => {
      const list = document.createElement("ul");
      list.className = name;
      return list;
    });
    const plot = document.createElement("div");
    plot.className = "plot";
    plot.append(this.scale, this.svg, this.times);
    this.figure.append(caption, plot, this.legend);
    this.figure.hidden = optional;
    parent.append(this.figure);
    this.draw();
  }

  // `values`: series -> value or null.
  push(values) {
    for (const name of Object.keys(values)) if (!this.names.includes(name)) this.names.push(name);
    this.points.push(values);
    if (this.points.length > MAX_POINTS) this.points.shift();
    if (Object.values(values).some((value) => value !== null)) this.figure.hidden = false;
    this.draw();
  }

  draw() {
    const sums = this.points.map((point) => {
      const values = this.names.map((name) => point[name] ?? 0);
      return this.stacked ? values.reduce((sum, value) => sum + value, 0) : Math.max(0, ...values);
    });
    this.top = niceCeiling(Math.max(this.least, ...sums));
    this.svg.replaceChildren(...this.grid(), ...(this.stacked ? this.areas() : this.lines()));
    this.describe();
  }

  x(index) {
    const across = Math.max(MIN_POINTS, this.points.length) - 1;
    return WIDTH - ((this.points.length - 1 - index) * WIDTH) / across;
  }

  y(value) {
    return HEIGHT - (HEIGHT * Math.min(value, this.top)) / this.top;
  }

  grid() {
    return [0, 0.5, 1].map((part) =>
      element("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part }),
    );
  }

  lines() {
    return this.names.flatMap((name, series) => {
      const places = this.points.map((point, index) => {
        const value = point[name] ?? null;
        return value === null ? null : `${this.x(index).toFixed(1)} ${this.y(value).toFixed(1)}`;
      });
      const { lines, dots } = linePaths(places);
      const color = `series${series % SERIES}`;
      return [element("path", { class: `lines ${color}`, d: lines }), element("path", { class: `dots ${color}`, d: dots })];
    });
  }

  areas() {
    const floors = this.points.map(() => 0);
    return this.names.map((name, series) => {
      const lower = this.points.map((_, index) => `${this.x(index).toFixed(1)} ${this.y(floors[index]).toFixed(1)}`);
      this.points.forEach((point, index) => (floors[index] += point[name] ?? 0));
      const upper = this.points.map((_, index) => `${this.x(index).toFixed(1)} ${this.y(floors[index]).toFixed(1)}`);
      const outline = [...upper, ...lower.reverse()];
      return element("path", { class: `areas series${series % SERIES}`, d: outline.length ? `M${outline.join("L")}Z` : "" });
    });
  }

  // The newest values as text, also for those who cannot see the lines.
  describe() {
    const newest = this.points[this.points.length - 1] ?? {};
    const said = this.names.map((name) => `${name} ${show(newest[name], this.unit)}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${said || "no figures yet"}`);
    const entries = this.names.map((name, series) => {
      const entry = document.createElement("li");
      const [color, value] = [document.createElement("i"), document.createElement("b")];
      color.className = `series${series % SERIES}`;
      value.textContent = show(newest[name], "");
      entry.append(color, `${name} `, value);
      return entry;
    });
    this.legend.replaceChildren(...entries);
    const across = (Math.max(MIN_POINTS, this.points.length) - 1) * this.period;
    this.scale.replaceChildren(...[this.top, this.top / 2, 0].map((value) => item(show(value, ""))));
    this.times.replaceChildren(...[ago(across), ago(across / 2), "now"].map(item));
  }
}
