/* The documents of the reader: added by picker or drag and drop, with progress; listed with their state; searched; deleted. */

import { Component } from "./vendor/preact.js";
import { call, getJSON, upload } from "./api.js";
import { Confirmed, shownTime, Table } from "./controls.js";
import { Passage } from "./cited.js";
import { html } from "./html.js";
import { visible } from "./markdown.js";
import { shownBytes } from "./metrics.js";

const PERIOD_MS = 1500; // between two readings of the list while a document is on its way
const PAGE = 100; // documents that are asked for at once
const AT_ONCE = 2; // uploads
const COLUMNS = [["Name"], ["Kind"], ["Version", "right"], ["Passages", "right"], ["Size", "right"], ["Added"], ["State"], [""]];
const KINDS = ".txt,.md,.html,.csv,.tsv,.json,.jsonl,.docx,.pdf,.py,.js,.ts,.java,.c,.h,.cpp,.cs,.go,.rs,.rb,.php,.sql,.yaml,.yml,.toml,.xml,.rst,.log";

export class Documents extends Component {
  state = { documents: null, hasMore: false, error: "", uploads: [], isOver: false, query: "", found: null, isSearching: false };

  componentDidMount() {
    this.read();
    this.timer = setInterval(() => {
      const isMoving = this.state.documents?.some(({ status, next }) => ["queued", "parsing", "indexing"].includes(next?.status ?? status));
      if (isMoving && !document.hidden) this.read();
    }, PERIOD_MS);
  }

  componentWillUnmount() {
    clearInterval(this.timer);
    for (const { running } of this.state.uploads) running?.abort();
  }

  /** Reads the list from its beginning, as far as it is shown, and a page more where `more`. */
  read = async (more = false) => {
    try {
      const wanted = (this.state.documents?.length ?? 0) + (more ? PAGE : 0);
      let documents = [];
      let hasMore = true;
      while (hasMore && (!documents.length || documents.length < wanted)) {
        const query = new URLSearchParams({ limit: PAGE });
        if (documents.length) query.set("after", documents.at(-1).id);
        const page = await getJSON(`/v1/rag/documents?${query}`);
        documents = [...documents, ...page.data];
        hasMore = page.has_more;
      }
      this.setState({ documents, hasMore, error: "" });
    } catch (error) {
      this.setState({ error: error.message, documents: this.state.documents ?? [] });
    }
  };

  remove = async (id) => {
    try {
      await call(`/v1/rag/documents/${encodeURIComponent(id)}`, { method: "DELETE" });
    } catch (error) {
      if (error.status !== 404) this.setState({ error: error.message });
    }
    await this.read();
  };

  // Uploads

  add = (files) => {
    const made = Array.from(files, (file) => ({ file, share: 0, state: "waits", error: "", note: "", running: null }));
    this.setState(({ uploads }) => ({ uploads: [...uploads.filter(({ state }) => state !== "done"), ...made] }), this.next);
  };

  /** Begins those whose turn has come. */
  next = () => {
    const { uploads } = this.state;
    const running = uploads.filter(({ state }) => state === "sent").length;
    for (const one of uploads.filter(({ state }) => state === "waits").slice(0, Math.max(AT_ONCE - running, 0))) this.send(one);
  };

  change = (one, some) => {
    Object.assign(one, some);
    this.setState({});
  };

  send = async (one, password = "") => {
    const running = new AbortController();
    this.change(one, { state: "sent", error: "", running, share: 0 });
    const query = new URLSearchParams({ name: one.file.name.slice(-255) });
    if (password) query.set("password", password);
    try {
      const progress = (share) => this.change(one, { share });
      const answer = await upload(`/v1/rag/documents?${query}`, one.file, { progress, signal: running.signal });
      const note = answer.duplicate_of ? `the same as ${answer.name}` : [`${answer.num_chunks} passage${answer.num_chunks === 1 ? "" : "s"}`, ...answer.warnings].join("; ");
      this.change(one, { state: "done", note });
      await this.read();
    } catch (error) {
      this.change(one, { state: "failed", error: error.name === "AbortError" ? "stopped" : error.message });
    }
    this.next();
  };

  drop = (event) => {
    event.preventDefault();
    this.setState({ isOver: false });
    this.add(event.dataTransfer.files);
  };

  // Search

  search = async (event) => {
    event.preventDefault();
    const query = this.state.query.trim();
    if (!query) return;
    this.setState({ isSearching: true });
    try {
      this.setState({ found: await getJSON("/v1/rag/search", { body: { query } }), error: "" });
    } catch (error) {
      this.setState({ error: error.message });
    }
    this.setState({ isSearching: false });
  };

  render(_, { documents, hasMore, error, uploads, isOver, query, found, isSearching }) {
    const over = (is) => (event) => (event.preventDefault(), this.setState({ isOver: is }));
    return html`<div class="view documents">
      <h1>Documents</h1>
      ${error && html`<p class="error" role="alert">${visible(error)}</p>`}
      <label class=${`drop ${isOver ? "over" : ""}`} onDragOver=${over(true)} onDragLeave=${over(false)} onDrop=${this.drop}>
        <span>Drop files here, or <u>choose files</u></span>
        <small>Text, Markdown, HTML, CSV, JSON, code, DOCX, PDF</small>
        <input type="file" multiple class="sr-only" accept=${KINDS} onChange=${(event) => (this.add(event.target.files), (event.target.value = ""))} />
      </label>
      ${uploads.length > 0 && html`<ul class="uploads" aria-label="Uploads">${uploads.map((one) => html`<${Upload} one=${one} send=${this.send} />`)}</ul>`}
      <form class="row" role="search" onSubmit=${this.search}>
        <label class="field wide grows"><span>Search</span>
          <input type="search" name="query" value=${query} maxlength="8192" onInput=${(event) => this.setState({ query: event.target.value, found: event.target.value ? found : null })} />
        </label>
        <button class="primary" disabled=${isSearching || !query.trim()}>Search</button>
      </form>
      ${found && html`<${Results} found=${found} />`}
      ${documents && html`<${List} documents=${documents} remove=${this.remove} />`}
      ${hasMore && html`<button type="button" onClick=${() => this.read(true)}>More</button>`}
    </div>`;
  }
}

function Upload({ one, send }) {
  const { file, share, state, error, note } = one;
  const wantsPassword = state === "failed" && /password/i.test(error);
  const submit = (event) => {
    event.preventDefault();
    send(one, new FormData(event.target).get("password"));
  };
  return html`<li>
    <span class="name"><bdi>${visible(file.name)}</bdi> <small>${shownBytes(file.size)}</small></span>
    ${state === "sent" && html`<progress max="1" value=${share < 1 ? share : undefined} aria-label=${`${file.name} is sent`} /><small>${share < 1 ? `${Math.round(100 * share)} %` : "is read"}</small>`}
    ${state === "sent" && html`<button type="button" class="quiet" onClick=${() => one.running.abort()}>Stop</button>`}
    ${state === "waits" && html`<small>waits</small>`}
    ${state === "done" && html`<small>${visible(note)}</small>`}
    ${state === "failed" && html`<span class="error" role="alert">${visible(error)}</span>`}
    ${wantsPassword &&
    html`<form class="row" onSubmit=${submit}><input type="password" name="password" required aria-label=${`Password of ${file.name}`} autocomplete="off" /><button>Try again</button></form>`}
  </li>`;
}

function List({ documents, remove }) {
  const rows = documents.map((one) => [
    html`<bdi title=${one.id}>${visible(one.name)}</bdi>`,
    one.kind ?? "–",
    one.version || "–",
    one.num_chunks || "–",
    shownBytes(one.bytes),
    shownTime(one.updated),
    html`<${State} of=${one} />`,
    html`<${Confirmed} label="Delete" title=${`Delete ${one.name}`} act=${() => remove(one.id)} />`,
  ]);
  return html`<section><h2>Yours</h2><${Table} label="Documents" columns=${COLUMNS} rows=${rows} empty="There are none. Answers can cite what you add." /></section>`;
}

function State({ of: { status, error, vectors, next } }) {
  const why = next?.error ?? error;
  const now = next?.status ?? status;
  const done = now === "indexing" ? ` ${vectors.done}/${vectors.total}` : "";
  return html`<span class=${`state ${now === "ready" ? "loaded" : now}`}>${next ? `next version: ${now}` : now}${done}${why ? `: ${visible(why)}` : ""}</span>`;
}

function Results({ found: { data, notes } }) {
  return html`<section aria-label="Found" aria-live="polite">
    ${notes.map((note) => html`<p class="dim">${note}</p>`)}
    ${!data.length && html`<p class="dim">Nothing was found.</p>`}
    ${data.map((hit) => html`<${Passage} key=${`${hit.document}-${hit.position}`} of=${hit} isOpen />`)}
  </section>`;
}
