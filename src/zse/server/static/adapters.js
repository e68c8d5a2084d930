/* LoRA adapters of the models: which there are, one more, one less. */

import { Component } from "./vendor/preact.js";
import { call, getJSON } from "./api.js";
import { Confirmed, Field, Table } from "./controls.js";
import { html } from "./html.js";
import { shownBytes } from "./metrics.js";

const COLUMNS = [["Adapter"], ["State"], ["Rank", "right"], ["Modules"], ["Size", "right"], ["Folder"], [""]];

export class Adapters extends Component {
  state = { adapters: [], error: "", isBusy: false };

  componentDidMount() {
    this.read();
  }

  read = async () => {
    try {
      this.setState({ adapters: (await getJSON("/admin/adapters")).data });
    } catch (error) {
      this.setState({ error: error.message });
    }
  };

  change = async (path, body) => {
    this.setState({ isBusy: true, error: "" });
    try {
      await call(path, { body });
      this.props.reload();
    } catch (error) {
      this.setState({ error: error.message });
    }
    this.setState({ isBusy: false });
    await this.read();
  };

  load = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const [model, name, path] = ["model", "name", "path"].map((field) => form.get(field).trim());
    this.change("/admin/adapters", { model, name, path });
  };

  render({ models }, { adapters, error, isBusy }) {
    const rows = adapters.map(({ id, model, name, state, rank, modules, bytes, path }) => [
      id,
      html`<span class=${`state ${state}`}>${state}</span>`,
      rank ?? "–",
      modules?.join(", ") ?? "–",
      bytes ? shownBytes(bytes) : "–",
      html`<code>${path}</code>`,
      html`<${Confirmed} label="Unload" title=${`Unload ${id}`} disabled=${isBusy} act=${() => this.change("/admin/adapters/unload", { model, name })} />`,
    ]);
    const bases = models.filter(({ parent }) => !parent);
    return html`<section>
      <h2>Adapters</h2>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <${Table} label="Adapters" columns=${COLUMNS} rows=${rows} empty="No adapter is loaded. Requests name one as model:adapter." />
      <form class="row" aria-label="Load an adapter" onSubmit=${this.load}>
        <label class="field wide"><span>Model</span><select name="model">${bases.map(({ id }) => html`<option value=${id}>${id}</option>`)}</select></label>
        <${Field} label="Adapter's name" name="name" required maxlength="64" pattern="[A-Za-z0-9][A-Za-z0-9._\\-]*" />
        <${Field} label="Folder" name="path" required maxlength="4096" placeholder="PEFT, on the server's machine" size="32" />
        <button disabled=${isBusy}>Load</button>
      </form>
    </section>`;
  }
}
