/* The models that are served, with their states. */

import { html } from "./html.js";

export function Models({ models, reload }) {
  return html`<div class="view">
    <h1>Models</h1>
    <div class="scroll">
      <table>
        <thead><tr><th>Model</th><th>State</th><th class="right">Context</th></tr></thead>
        <tbody>
          ${models.map(
            (model) => html`<tr>
              <td>${model.id}</td>
              <td><span class=${`state ${model.state}`}>${model.state}</span></td>
              <td class="right">${model.max_model_len?.toLocaleString("en") ?? "–"}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    <button type="button" onClick=${reload}>Refresh</button>
  </div>`;
}
