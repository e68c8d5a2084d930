/* What the server does now: charts of /metrics, read every two seconds while the view is seen. */

import { Component } from "./vendor/preact.js";
import { call } from "./api.js";
import { Chart } from "./chart.js";
import { html } from "./html.js";
import { quantile, rate, Reading, shownBytes, shownNumber } from "./metrics.js";

const PERIOD_S = 2;
const COUNT = 90; // values of a chart
const MEMORY_USES = 6; // colours of the bar

const LINES = {
  made: (before, now) => rate(before, now, "zse_completion_tokens_total"),
  read: (before, now) => rate(before, now, "zse_prompt_tokens_total"),
  firstHalf: (before, now) => quantile(before, now, "zse_time_to_first_token_seconds", 0.5),
  firstMost: (before, now) => quantile(before, now, "zse_time_to_first_token_seconds", 0.95),
  between: (before, now) => quantile(before, now, "zse_time_between_tokens_seconds", 0.5),
  running: (before, now) => now.sum("zse_engine_running"),
  waiting: (before, now) => now.sum("zse_engine_waiting"),
  kv: (before, now) => now.kvUse(),
};

const asMs = (seconds) => (seconds === null ? "–" : `${shownNumber(1000 * seconds)} ms`);
const asShare = (share) => (share === null ? "–" : `${(100 * share).toFixed(0)} %`);
const asCount = (count) => (count === null ? "–" : String(Math.round(count)));

export class Dashboard extends Component {
  state = { reading: null, error: "" };
  history = Object.fromEntries(Object.keys(LINES).map((name) => [name, []]));

  componentDidMount() {
    this.read();
    this.timer = setInterval(() => document.hidden || this.read(), 1000 * PERIOD_S);
  }

  componentWillUnmount() {
    clearInterval(this.timer);
    this.isGone = true;
  }

  async read() {
    if (this.isReading) return;
    this.isReading = true;
    try {
      const text = await (await call("/metrics")).text();
      if (!this.isGone) this.take(new Reading(text, performance.now() / 1000));
    } catch (error) {
      if (!this.isGone) this.setState({ error: error.message });
    }
    this.isReading = false;
  }

  take(reading) {
    const before = this.state.reading;
    for (const [name, value] of Object.entries(before ? LINES : {})) {
      this.history[name] = [...this.history[name], value(before, reading)].slice(-COUNT);
    }
    this.setState({ reading, error: "" });
  }

  chart(title, show, lines, most) {
    const series = Object.entries(lines).map(([name, of]) => ({ name, values: this.history[of] }));
    return html`<${Chart} title=${title} series=${series} count=${COUNT} show=${show} most=${most} seconds=${COUNT * PERIOD_S} />`;
  }

  render(_, { reading, error }) {
    const asRate = (value) => (value === null ? "–" : `${shownNumber(value)}/s`);
    return html`<div class="view">
      <h1>Dashboard</h1>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <div class="charts">
        ${this.chart("Throughput, tokens", asRate, { answers: "made", prompts: "read" })}
        ${this.chart("Time to first token", asMs, { p50: "firstHalf", p95: "firstMost" })}
        ${this.chart("Time between tokens", asMs, { p50: "between" })}
        ${this.chart("Requests", asCount, { running: "running", waiting: "waiting" })}
        ${this.chart("KV pages in use", asShare, { "": "kv" }, 1)}
      </div>
      ${reading && html`<${Totals} reading=${reading} />`}
      ${reading && reading.models.map((model) => html`<${Memory} key=${model} model=${model} reading=${reading} />`)}
    </div>`;
  }
}

function Totals({ reading }) {
  const rows = [
    ["Answers", "zse_answers_total"],
    ["Prompt tokens", "zse_prompt_tokens_total"],
    ["of those cached", "zse_cached_prompt_tokens_total"],
    ["Answer tokens", "zse_completion_tokens_total"],
    ["Refused (503)", "zse_requests_refused_total"],
    ["Limited (429)", "zse_requests_limited_total"],
    ["Preemptions", "zse_engine_preemptions"],
    ["Engine restarts", "zse_engine_restarts_total"],
  ];
  return html`<section><h2>Since the start</h2>
    <dl class="totals">
      ${rows.map(([title, name]) => html`<div><dt>${title}</dt><dd>${Math.round(reading.sum(name)).toLocaleString("en")}</dd></div>`)}
    </dl>
  </section>`;
}

/** The planned device memory of a model, by use. */
function Memory({ model, reading }) {
  const uses = Object.entries(reading.memory(model)).sort(([, one], [, other]) => other - one);
  const total = uses.reduce((sum, [, bytes]) => sum + bytes, 0);
  return html`<section class="memory"><h2>${model} <small>${reading.state(model)}${total ? `, ${shownBytes(total)}` : ""}</small></h2>
    ${total > 0 &&
    html`<div class="bar" role="img" aria-label=${uses.map(([use, bytes]) => `${use} ${shownBytes(bytes)}`).join(", ")}>
        ${uses.map(([, bytes], index) => html`<span class=${`use-${index % MEMORY_USES}`} style=${{ flexGrow: bytes / total }} />`)}
      </div>
      <ul class="legend">
        ${uses.map(([use, bytes], index) => html`<li><span class=${`key use-${index % MEMORY_USES}`} />${use.replaceAll("_", " ")} ${shownBytes(bytes)}</li>`)}
      </ul>`}
  </section>`;
}
