/* Prometheus' text format, as GET /metrics has it, and what a dashboard makes of two readings. */

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** Samples of a text: [{name, labels, value}]. */
export function parse(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const sample = line.startsWith("#") ? null : LINE.exec(line);
    if (!sample) continue;
    const labels = {};
    for (const [, name, value] of (sample[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\[n"\\]/g, (escape) => ESCAPES[escape]);
    found.push({ name: sample[1], labels, value: Number(sample[3]) });
  }
  return found;
}

/** One reading. at: seconds. */
export class Reading {
  constructor(text, at) {
    this.at = at;
    this.samples = new Map();
    for (const sample of parse(text)) {
      if (!this.samples.has(sample.name)) this.samples.set(sample.name, []);
      this.samples.get(sample.name).push(sample);
    }
  }

  all(name, model) {
    return (this.samples.get(name) ?? []).filter(({ labels }) => model === undefined || labels.model === model);
  }

  sum(name, model) {
    return this.all(name, model).reduce((total, { value }) => total + value, 0);
  }

  get models() {
    return [...new Set(this.all("zse_model_state").map(({ labels }) => labels.model))];
  }

  state(model) {
    return this.all("zse_model_state", model).find(({ value }) => value === 1)?.labels.state ?? "";
  }

  /** {use: bytes} of a model that is loaded. */
  memory(model) {
    return Object.fromEntries(this.all("zse_engine_memory_bytes", model).map(({ labels, value }) => [labels.use, value]));
  }

  /** Share of the KV pages in use, 0 to 1; null where no model is loaded. Pages that only the prefix cache holds are free for the asking. */
  kvUse(model) {
    const pages = this.sum("zse_engine_pages", model);
    return pages ? 1 - this.sum("zse_engine_free_pages", model) / pages : null;
  }
}

/** Growth a second of a counter; a restart begins at zero. */
export function rate(before, now, name, model) {
  const grown = now.sum(name, model) - before.sum(name, model);
  return Math.max(grown, 0) / Math.max(now.at - before.at, 1e-3);
}

/** The quantile of what a histogram counted between two readings, in its unit, by its buckets (as Prometheus' histogram_quantile); null: nothing
    was counted. */
export function quantile(before, now, name, share, model) {
  const grown = new Map();
  for (const [reading, sign] of [[now, 1], [before, -1]]) {
    for (const { labels, value } of reading.all(`${name}_bucket`, model)) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      grown.set(bound, (grown.get(bound) ?? 0) + sign * value);
    }
  }
  const buckets = [...grown].sort(([one], [other]) => one - other);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let [low, counted] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= share * total) return bound === Infinity ? low : low + ((bound - low) * (share * total - counted)) / Math.max(count - counted, 1);
    [low, counted] = [bound, count];
  }
  return low;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function shownBytes(bytes) {
  const power = bytes > 0 ? Math.min(Math.floor(Math.log2(bytes) / 10), UNITS.length - 1) : 0;
  const number = bytes / 1024 ** power;
  return `${number >= 100 || power === 0 ? number.toFixed(0) : number.toFixed(1)} ${UNITS[power]}`;
}

export function shownNumber(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? Math.round(value).toLocaleString("en") : value >= 10 ? value.toFixed(1) : value.toFixed(value ? 2 : 0);
}
