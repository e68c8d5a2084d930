/* LoRA adapters of the models: which there are, one more, of the server's machine or sent there, one less. */

import { Component } from "./vendor/preact.js";
import { call, getJSON, upload } from "./api.js";
import { Confirmed, Field, Table } from "./controls.js";
import { html } from "./html.js";
import { shownBytes } from "./metrics.js";

const COLUMNS = [["Adapter"], ["State"], ["Rank", "right"], ["Modules"], ["Size", "right"], ["Folder"], [""]];

export class Adapters extends Component {
  state = { adapters: [], error: "", isBusy: false, sent: null }; // sent: how much of an upload, from 0 to 1; null: there is none

  componentDidMount() {
    this.read();
  }

  componentWillUnmount() {
    this.sending?.abort();
  }

  read = async () => {
    try {
      this.setState({ adapters: (await getJSON("/admin/adapters")).data });
    } catch (error) {
      this.setState({ error: error.message });
    }
  };

  change = (path, options) => this.run(() => call(path, options));

  run = async (work) => {
    this.setState({ isBusy: true, error: "" });
    try {
      await work();
      this.props.reload();
    } catch (error) {
      if (error.name !== "AbortError") this.setState({ error: error.message });
    }
    this.setState({ isBusy: false, sent: null });
    await this.read();
  };

  send = (event) => {
    event.preventDefault();
    const form = event.target;
    this.sending = new AbortController();
    this.setState({ sent: 0 });
    this.run(async () => {
      await upload("/admin/adapters/upload", new FormData(form), { progress: (sent) => this.setState({ sent }), signal: this.sending.signal });
      form.reset();
    });
  };

  load = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const [model, name, path] = ["model", "name", "path"].map((field) => form.get(field).trim());
    this.change("/admin/adapters", { body: { model, name, path } });
  };

  render({ models }, { adapters, error, isBusy, sent }) {
    const rows = adapters.map(({ id, model, name, state, rank, modules, bytes, path, uploaded }) => [
      id,
      html`<span class=${`state ${state}`}>${state}</span>`,
      rank ?? "–",
      modules?.join(", ") ?? "–",
      bytes ? shownBytes(bytes) : "–",
      uploaded ? "uploaded" : html`<code>${path}</code>`,
      html`<span class="row">
        ${state === "stored" && html`<button type="button" class="quiet" aria-label=${`Load ${id}`} disabled=${isBusy} onClick=${() => this.change("/admin/adapters", { body: { model, name } })}>Load</button>`}
        ${state !== "stored" && html`<${Confirmed} label="Unload" title=${`Unload ${id}`} disabled=${isBusy} act=${() => this.change("/admin/adapters/unload", { body: { model, name } })} />`}
        ${uploaded && html`<${Confirmed} label="Delete" title=${`Delete ${id}`} disabled=${isBusy} act=${() => this.change(`/admin/adapters/${encodeURIComponent(id)}`, { method: "DELETE" })} />`}
      </span>`,
    ]);
    const choice = () => html`<label class="field wide"><span>Model</span><select name="model">${models.filter(({ parent }) => !parent).map(({ id }) => html`<option value=${id}>${id}</option>`)}</select></label>`;
    return html`<section>
      <h2>Adapters</h2>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <${Table} label="Adapters" columns=${COLUMNS} rows=${rows} empty="No adapter is loaded. Requests name one as model:adapter." />
      <form class="row" aria-label="Load an adapter" onSubmit=${this.load}>
        ${choice()}
        <${Field} label="Adapter's name" name="name" required maxlength="64" pattern="[A-Za-z0-9][A-Za-z0-9._\\-]*" />
        <${Field} label="Folder" name="path" required maxlength="4096" placeholder="PEFT, on the server's machine" size="32" />
        <button disabled=${isBusy}>Load</button>
      </form>
      <form class="row" aria-label="Upload an adapter" onSubmit=${this.send}>
        ${choice()}
        <${Field} label="Adapter's name" name="name" required maxlength="64" pattern="[a-z0-9_\\-]+" title="a-z, 0-9, _ and -" />
        <${Field} label="adapter_config.json" name="config" type="file" accept=".json,application/json" required />
        <${Field} label="adapter_model.safetensors" name="weights" type="file" accept=".safetensors" required />
        <button disabled=${isBusy}>Upload</button>
        ${sent !== null &&
        html`<span class="row" role="status"><progress max="1" value=${sent} aria-label="Sent" /> ${sent < 1 ? `${Math.floor(100 * sent)} %` : "checking and loading"} <button type="button" class="quiet" onClick=${() => this.sending.abort()}>Stop</button></span>`}
      </form>
    </section>`;
  }
}
