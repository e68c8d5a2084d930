/* Controls that several views share. */

import { useState } from "./vendor/hooks.js";
import { html } from "./html.js";

/** A button that asks once more before it does what cannot be undone. title: for those who do not see the row that it stands in. */
export function Confirmed({ label, title, act, disabled = false }) {
  const [asks, ask] = useState(false);
  if (!asks) {
    return html`<button type="button" class="quiet danger" aria-label=${title} disabled=${disabled} onClick=${() => ask(true)}>${label}</button>`;
  }
  return html`<span role="group" aria-label=${title}>
    <button type="button" class="danger" ref=${(button) => button?.focus()} onClick=${() => (ask(false), act())}>${label}, really</button>
    <button type="button" class="quiet" onClick=${() => ask(false)}>No</button>
  </span>`;
}

/** A table; on a narrow window its rows are lists, each cell behind its column's title. columns: [title, class]. rows: lists of cells. */
export function Table({ label, columns, rows, empty }) {
  if (!rows.length) return html`<p class="dim">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>
    <table class="list">
      <thead><tr>${columns.map(([title, of = ""]) => html`<th class=${of}>${title}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr>${row.map((cell, index) => html`<td class=${columns[index][1] ?? ""} data-title=${columns[index][0]}>${cell}</td>`)}</tr>`)}</tbody>
    </table>
  </div>`;
}

/** A labelled box of a form. The rest goes to its input. */
export function Field({ label, note, ...rest }) {
  return html`<label class="field wide"><span>${label}</span><input autocomplete="off" ...${rest} />${note && html`<small>${note}</small>`}</label>`;
}

/** A time of the server, in seconds since 1970, in the reader's own zone. */
export function shownTime(seconds) {
  return seconds === null || seconds === undefined ? "–" : new Date(1000 * seconds).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}
