/* The keys of the server's database: who has which, made, changed, rotated and revoked; what they used; who changed them. */

import { Component } from "./vendor/preact.js";
import { call, getJSON } from "./api.js";
import { Confirmed, Field, shownTime, Table } from "./controls.js";
import { html } from "./html.js";
import { Copy } from "./markdown.js";
import { shownNumber } from "./metrics.js";

const DAY_S = 86_400;
const PERIOD_S = 5; // between two readings of the usage
const PERIODS = { 1: "one day", 7: "seven days", 30: "thirty days", 365: "a year" };
// Name: label, step of the input, note.
const NUMBERS = {
  rpm: ["Requests a minute", "1", "0: any number"],
  tpm: ["Tokens a minute", "1", "0: any number"],
  concurrency: ["Answers at once", "1", "0: any number"],
  weight: ["Weight", "any", "of its share of queue and engine"],
  input_price: ["Price of prompts", "any", "a million tokens"],
  cached_price: ["Price of cached prompts", "any", "a million tokens"],
  output_price: ["Price of answers", "any", "a million tokens"],
};
const ENDLESS = ["models", "weight", "expires", "cached_price"]; // that a change takes away where its box is empty

export class Keys extends Component {
  state = { keys: null, usage: [], audit: [], days: 7, error: "", made: null, edited: null };

  componentDidMount() {
    this.load();
    this.timer = setInterval(() => document.hidden || !this.state.keys || this.loadUsage(this.state.days).catch(this.fail), 1000 * PERIOD_S);
  }

  componentWillUnmount() {
    clearInterval(this.timer);
  }

  fail = (error) => this.setState({ error: error.message });

  load = async () => {
    try {
      const { data } = await getJSON("/admin/keys");
      this.setState({ keys: data, error: "" });
      await this.loadUsage(this.state.days);
      this.setState({ audit: (await getJSON("/admin/audit", { body: { last: 50 } })).data });
    } catch (error) {
      this.fail(error);
    }
  };

  loadUsage = async (days) => {
    const body = { since: Math.floor(Date.now() / 1000 - days * DAY_S) };
    this.setState({ days, usage: (await getJSON("/admin/keys/usage", { body })).data });
  };

  /** Asks for a change; what it answers, or null with the error shown. */
  change = async (path, body) => {
    try {
      const done = await (await call(path, { body })).json();
      this.setState({ edited: null, made: done.key ? done : null });
      await this.load();
      return done;
    } catch (error) {
      this.fail(error);
      return null;
    }
  };

  render(_, { keys, usage, audit, days, error, made, edited }) {
    return html`<div class="view">
      <div class="row"><h1>Keys</h1>
        ${keys && html`<button type="button" class="primary" onClick=${() => this.setState({ edited: {}, error: "" })}>New key</button>`}
      </div>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      ${made && html`<${Made} made=${made} close=${() => this.setState({ made: null })} />`}
      ${edited && html`<${KeyForm} key=${edited.name} of=${edited} models=${this.props.models} save=${this.change} close=${() => this.setState({ edited: null })} />`}
      ${keys && html`<${KeyTable} keys=${keys} edit=${(of) => this.setState({ edited: of, error: "" })} change=${this.change} />`}
      ${keys &&
      html`<section>
        <div class="row"><h2>Usage</h2>
          <label><span class="sr-only">Of the last</span>
            <select value=${days} onChange=${(event) => this.loadUsage(Number(event.target.value))}>
              ${Object.entries(PERIODS).map(([count, title]) => html`<option value=${count}>${title}</option>`)}
            </select>
          </label>
        </div>
        <${Usage} rows=${usage} />
      </section>
      <section><h2>Changes</h2><${Audit} lines=${audit} /></section>`}
    </div>`;
  }
}

/** The text of a new key, which no other answer has. */
function Made({ made, close }) {
  return html`<div class="card" role="status">
    <p>The key of <strong>${made.name}</strong>. It is shown once: copy it now.</p>
    <p><code class="secret">${made.key}</code></p>
    <div class="row"><${Copy} text=${made.key} label="Copy the key" /><button type="button" onClick=${close}>Done</button></div>
  </div>`;
}

const limits = ({ rpm, tpm, concurrency }) =>
  [rpm && `${rpm} rpm`, tpm && `${tpm} tpm`, concurrency && `${concurrency} at once`].filter(Boolean).join(", ") || "–";

function KeyTable({ keys, edit, change }) {
  const columns = [["Name"], ["Begins with"], ["Tenant"], ["State"], ["May use"], ["Limits"], ["Expires"], [""]];
  const rows = keys.map((key) => {
    const ended = key.state === "revoked";
    return [
      key.name,
      html`<code>${key.prefix}…</code>`,
      key.tenant,
      html`<span class=${`state ${key.state}`}>${key.state}</span>`,
      `${key.admin ? "admin; " : ""}${key.models?.join(", ") ?? "all models"}`,
      limits(key),
      shownTime(key.expires),
      !ended &&
        html`<div class="row">
          <button type="button" class="quiet" aria-label=${`Change ${key.name}`} onClick=${() => edit(key)}>Change</button>
          <${Confirmed} label="Rotate" title=${`Rotate ${key.name}`} act=${() => change("/admin/keys/rotate", { name: key.name })} />
          <${Confirmed} label="Revoke" title=${`Revoke ${key.name}`} act=${() => change("/admin/keys/revoke", { name: key.name })} />
        </div>`,
    ];
  });
  return html`<${Table} label="Keys" columns=${columns} rows=${rows} empty="The database has no key yet." />`;
}

/** A time as an input of type datetime-local has it. */
function asLocal(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const date = new Date(1000 * seconds);
  return new Date(date.getTime() - 60_000 * date.getTimezoneOffset()).toISOString().slice(0, 16);
}

/** What a form asks for: settings, and those to take away of a key that is changed. */
export function settingsOf(form, isNew) {
  const found = { admin: form.get("admin") === "on" };
  for (const name of Object.keys(NUMBERS)) if (form.get(name)) found[name] = Number(form.get(name));
  const models = form.getAll("models").filter(Boolean);
  if (models.length) found.models = models;
  if (form.get("expires")) found.expires = Math.floor(new Date(form.get("expires")).getTime() / 1000);
  if (isNew && form.get("tenant")) found.tenant = form.get("tenant");
  if (isNew) return found;
  const clear = ENDLESS.filter((name) => !(name in found));
  for (const name of ["rpm", "tpm", "concurrency", "input_price", "output_price"]) found[name] ??= 0;
  return clear.length ? { ...found, clear } : found;
}

/** of: the key to change; {} a new one. */
function KeyForm({ of, models, save, close }) {
  const isNew = !of.name;
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    save(isNew ? "/admin/keys" : "/admin/keys/update", { name: isNew ? form.get("name").trim() : of.name, ...settingsOf(form, isNew) });
  };
  const focus = (form) => form && !form.contains(document.activeElement) && form.querySelector("input").focus();
  const onKeyDown = (event) => event.key === "Escape" && close();
  const names = [...new Set([...models.map(({ id }) => id), ...(of.models ?? [])])];
  return html`<form class="card key-form" aria-label=${isNew ? "New key" : `Change ${of.name}`} onSubmit=${submit} onKeyDown=${onKeyDown} ref=${focus}>
    <h2>${isNew ? "New key" : `Change ${of.name}`}</h2>
    ${isNew && html`<${Field} label="Name" name="name" required maxlength="64" pattern="[A-Za-z0-9][A-Za-z0-9._\\-]*" />`}
    ${isNew && html`<${Field} label="Tenant" name="tenant" maxlength="64" note="who pays; empty: the name" />`}
    ${Object.entries(NUMBERS).map(
      ([name, [label, step, note]]) =>
        html`<${Field} label=${label} name=${name} type="number" min="0" step=${step} note=${note} defaultValue=${of[name] || ""} />`,
    )}
    <${Field} label="Expires" name="expires" type="datetime-local" note="empty: never" defaultValue=${asLocal(of.expires)} />
    <fieldset>
      <legend>Models</legend>
      <small>none chosen: all</small>
      ${names.map(
        (name) => html`<label class="check"><input type="checkbox" name="models" value=${name} defaultChecked=${of.models?.includes(name) ?? false} /> ${name}</label>`,
      )}
    </fieldset>
    <label class="check"><input type="checkbox" name="admin" defaultChecked=${of.admin ?? false} /> Admin: sees all figures, changes keys</label>
    <div class="row"><button class="primary">${isNew ? "Make the key" : "Save"}</button><button type="button" onClick=${close}>Cancel</button></div>
  </form>`;
}

function Usage({ rows }) {
  const columns = [
    ["Key"], ["Model"], ["Requests", "right"], ["Failed", "right"], ["Prompt tokens", "right"], ["Cached", "right"], ["Answer tokens", "right"],
    ["First token", "right"], ["Cost", "right"],
  ];
  const count = (value) => value.toLocaleString("en");
  const shown = rows.map((row) => [
    row.key || `(${row.tenant})`, row.model, count(row.requests), count(row.failed), count(row.prompt_tokens), count(row.cached_tokens),
    count(row.completion_tokens), row.mean_first_token_ms === null ? "–" : `${shownNumber(row.mean_first_token_ms)} ms`, row.cost ? shownNumber(row.cost) : "–",
  ]);
  return html`<${Table} label="Usage" columns=${columns} rows=${shown} empty="Nothing was used in this time." />`;
}

function Audit({ lines }) {
  const columns = [["When"], ["Who"], ["What"], ["Key"], ["How"]];
  const rows = lines.map(({ at, actor, action, subject, detail }) => [
    shownTime(at), actor, action, subject, html`<code>${JSON.stringify(detail)}</code>`,
  ]);
  return html`<${Table} label="Changes" columns=${columns} rows=${rows} empty="No key was changed." />`;
}
