/* The server's log as it comes, the newest record first. Names and messages in it are strangers' words: they stay text. */

import { Component } from "./vendor/preact.js";
import { call, events } from "./api.js";
import { Table } from "./controls.js";
import { html } from "./html.js";
import { visible } from "./markdown.js";

const MOST = 500; // records that are shown
const AGAIN_MS = 2000; // after the stream has broken
const TYPING_MS = 300; // without another letter, before a search is asked for
const COLUMNS = [["Time"], ["Level"], ["Status", "right"], ["Message"]];

export class Logs extends Component {
  state = { records: [], level: "info", search: "", isPaused: false, error: "" };

  componentDidMount() {
    this.follow();
  }

  componentWillUnmount() {
    this.stop();
    this.isGone = true;
  }

  stop() {
    clearTimeout(this.timer);
    this.reading?.abort();
  }

  /** Reads from the beginning with what the reader has chosen, and on until that changes. */
  follow = async () => {
    this.stop();
    const reading = (this.reading = new AbortController());
    const { level, search } = this.state;
    const query = new URLSearchParams({ level, search, limit: MOST, stream: true });
    let records = [];
    try {
      const response = await call(`/admin/logs?${query}`, { signal: reading.signal });
      this.setState({ records, error: "" });
      for await (const record of events(response)) {
        records = [record, ...records].slice(0, MOST);
        // One change a frame, however many records come.
        this.frame ||= requestAnimationFrame(() => ((this.frame = 0), reading.signal.aborted || this.setState({ records })));
      }
    } catch (error) {
      if (reading.signal.aborted) return;
      this.setState({ error: error.message });
    }
    if (!this.isGone) this.timer = setTimeout(this.follow, AGAIN_MS);
  };

  choose = (some, wait = 0) => {
    this.stop();
    this.setState({ ...some, isPaused: false });
    this.timer = setTimeout(this.follow, wait);
  };

  pause = () => {
    if (this.state.isPaused) return this.choose({});
    this.stop();
    this.setState({ isPaused: true });
  };

  render(_, { records, level, search, isPaused, error }) {
    const rows = records.map((record) => [
      html`<time datetime=${record.time} title=${record.time}>${new Date(record.time).toLocaleTimeString()}</time>`,
      html`<span class=${`level ${record.level}`}>${record.level}</span>`,
      record.status || "–",
      html`<span class="record">${visible(record.message)}</span>${record.exception && html`<pre>${visible(record.exception)}</pre>`}`,
    ]);
    return html`<div class="view">
      <h1>Logs</h1>
      <form class="row" onSubmit=${(event) => event.preventDefault()}>
        <label class="field wide"><span>Level</span>
          <select name="level" value=${level} onChange=${(event) => this.choose({ level: event.target.value })}>
            ${["debug", "info", "warning", "error"].map((name) => html`<option value=${name}>${name}</option>`)}
          </select>
        </label>
        <label class="field wide"><span>Search</span><input type="search" name="search" maxlength="200" placeholder="a request's id, a path" value=${search} onInput=${(event) => this.choose({ search: event.target.value }, TYPING_MS)} /></label>
        <button type="button" aria-pressed=${isPaused} onClick=${this.pause}>${isPaused ? "Go on" : "Pause"}</button>
      </form>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <${Table} label="Log" columns=${COLUMNS} rows=${rows} empty="No record of this kind yet." />
    </div>`;
  }
}
