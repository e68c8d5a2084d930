/* The models: those that are served, with what an admin's key may do to them, and those of the store that could be. */

import { Component } from "./vendor/preact.js";
import { Adapters } from "./adapters.js";
import { call, events, getJSON } from "./api.js";
import { Confirmed, Field, Table } from "./controls.js";
import { html } from "./html.js";
import { shownBytes } from "./metrics.js";

const PERIOD_S = 2;
const BUSY_PERIOD_S = 0.5; // while a model loads

export const Models = (props) => (props.isAdmin ? html`<${Administered} ...${props} />` : html`<${Listed} ...${props} />`);

const shownState = (state) => html`<span class=${`state ${state}`}>${state}</span>`;
const shownCount = (count) => count?.toLocaleString("en") ?? "–";

/** What any key sees. */
function Listed({ models, reload }) {
  const rows = models.map((model) => [model.id, shownState(model.state), shownCount(model.max_model_len)]);
  return html`<div class="view">
    <h1>Models</h1>
    <${Table} label="Models" columns=${[["Model"], ["State"], ["Context", "right"]]} rows=${rows} empty="This key may use no model." />
    <button type="button" onClick=${reload}>Refresh</button>
  </div>`;
}

class Administered extends Component {
  state = { models: [], pulls: [], stored: [], error: "", asked: new Set() };

  componentDidMount() {
    this.read();
  }

  componentWillUnmount() {
    clearTimeout(this.timer);
    this.isGone = true;
  }

  /** Reads the state, and again in a while. */
  read = async () => {
    clearTimeout(this.timer);
    let found = this.state;
    if (!document.hidden) {
      try {
        found = await getJSON("/admin/models");
        this.setState(found);
      } catch (error) {
        this.setState({ error: error.message });
      }
    }
    if (this.isGone) return;
    const isBusy = [...found.models, ...found.pulls].some(({ state }) => ["loading", "stopping", "pulling"].includes(state));
    clearTimeout(this.timer);
    this.timer = setTimeout(this.read, 1000 * (isBusy ? BUSY_PERIOD_S : PERIOD_S));
  };

  /** Asks for a change of a model, and shows what came of it. */
  change = async (name, path, options) => {
    this.setState(({ asked }) => ({ asked: new Set([...asked, name]), error: "" }));
    setTimeout(this.read, 100); // a load answers when it is done
    try {
      const response = await call(path, options);
      // A stream of progress: what it says is read with all the rest; only its end matters, and its error.
      if (options.body?.stream) for await (const _ of events(response));
    } catch (error) {
      this.setState({ error: `${name}: ${error.message}` });
    }
    this.setState(({ asked }) => ({ asked: new Set([...asked].filter((other) => other !== name)) }));
    if (this.isGone) return;
    await this.read();
    this.props.reload();
  };

  render(_, { models, pulls, stored, error, asked }) {
    const served = new Set(models.flatMap(({ names }) => names));
    const others = stored.filter(({ name }) => !served.has(name));
    return html`<div class="view">
      <h1>Models</h1>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <${Served} models=${models} asked=${asked} change=${this.change} />
      <section>
        <h2>Pull</h2>
        <${Pulls} pulls=${pulls} change=${this.change} />
      </section>
      <section>
        <h2>In the store</h2>
        <${Stored} models=${others} change=${this.change} />
      </section>
      <${Adapters} models=${this.props.models} reload=${this.props.reload} />
    </div>`;
  }
}

function Served({ models, asked, change }) {
  const columns = [["Model"], ["State"], ["Requests", "right"], ["Context", "right"], ["Memory", "right"], ["Last load", "right"], ["Stays loaded"], [""]];
  const rows = models.map((model) => [
    model.names.join(", "),
    html`<${State} model=${model} />`,
    shownCount(model.requests),
    shownCount(model.context),
    model.memory_bytes ? shownBytes(Object.values(model.memory_bytes).reduce((sum, bytes) => sum + bytes, 0)) : "–",
    model.load_ms ? `${(model.load_ms / 1000).toFixed(1)} s` : "–",
    model.keep_alive_s ? `${shownCount(model.keep_alive_s)} s unused` : model.keep_alive_s === 0 ? "while used" : "always",
    html`<${Actions} model=${model} isAsked=${asked.has(model.name)} change=${change} />`,
  ]);
  return html`<${Table} label="Models" columns=${columns} rows=${rows} empty="…" />`;
}

function State({ model: { state, progress, problem } }) {
  return html`${shownState(state)}
    ${state === "loading" && html` <progress max="1" value=${progress ?? undefined} aria-label="Share that is read" />`}
    ${problem && html`<p class="error">${problem}</p>`}`;
}

function Actions({ model: { name, state, requests }, isAsked, change }) {
  const path = `/admin/models/${encodeURIComponent(name)}`;
  const load = () => change(name, `${path}/load`, { body: {} });
  const unload = (force) => () => change(name, `${path}/unload`, { body: { force } });
  const canUnload = ["loaded", "loading", "restarting"].includes(state);
  return html`<div class="row">
    ${!canUnload && html`<button type="button" class="quiet" aria-label=${`Load ${name}`} disabled=${isAsked} onClick=${load}>Load</button>`}
    ${canUnload &&
    (requests
      ? html`<${Confirmed} label="End requests, unload" title=${`End the requests of ${name} and unload it`} act=${unload(true)} />`
      : html`<button type="button" class="quiet" aria-label=${`Unload ${name}`} onClick=${unload(false)}>Unload</button>`)}
    <${Confirmed} label="Remove" title=${`Serve ${name} no more`} act=${() => change(name, path, { method: "DELETE" })} />
  </div>`;
}

/** Fetches models into the store, and serves them. */
function Pulls({ pulls, change }) {
  const pull = (event) => {
    event.preventDefault();
    const name = new FormData(event.target).get("name").trim();
    if (name) change(name, `/admin/models/${encodeURIComponent(name)}/pull`, { body: { stream: true } });
    event.target.reset();
  };
  const rows = pulls.map(({ name, state, doing, done_bytes: done, total_bytes: total, notice, problem }) => [
    name,
    shownState(state),
    html`${state === "pulling" && html`<progress max="1" value=${total ? done / total : undefined} aria-label="Share that is fetched" /> `}
    ${problem ?? (state === "pulling" ? doing : notice) ?? ""}${state === "pulling" && total > 0 && `, ${shownBytes(done)} of ${shownBytes(total)}`}`,
  ]);
  return html`<form class="row" onSubmit=${pull}>
      <${Field} label="Name" name="name" required maxlength="256" placeholder="catalog name or hf:ORG/NAME" size="32" />
      <button>Pull</button>
    </form>
    ${rows.length > 0 && html`<${Table} label="Pulls" columns=${[["Model"], ["State"], [""]]} rows=${rows} />`}`;
}

function Stored({ models, change }) {
  const rows = models.map(({ name, bytes, licence }) => [
    name,
    shownBytes(bytes),
    licence ?? "–",
    html`<button type="button" class="quiet" aria-label=${`Serve ${name}`} onClick=${() => change(name, "/admin/models", { body: { model: name } })}>Serve</button>`,
  ]);
  const empty = "Every model of the store is served.";
  return html`<${Table} label="In the store" columns=${[["Model"], ["Size", "right"], ["Licence"], [""]]} rows=${rows} empty=${empty} />`;
}
