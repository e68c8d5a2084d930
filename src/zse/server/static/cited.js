/* Documents in the chat: the switch that asks for them, and the passages that an answer cites, each folded behind its marker. */

import { html } from "./html.js";
import { visible } from "./markdown.js";
import { keep, kept } from "./store.js";

/** What the body of a chat request has for documents. */
export const grounding = () => (kept("documents", false) ? { rag: {} } : {});

/** Takes what a chunk says of documents into a message. */
export function takeCitations(node, chunk) {
  for (const note of chunk.rag?.notes ?? []) (node.notes ??= []).push(note);
  for (const { number, document, name, page, headings, text } of chunk.choices[0]?.delta.citations ?? []) {
    node.cited ??= [];
    if (!node.cited.some((known) => known.number === number)) node.cited.push({ number, document, name, page, headings, text });
  }
}

/** changed: shows what the switch is now. */
export function DocumentSwitch({ changed }) {
  const isOn = kept("documents", false);
  return html`<label class="check" title="Passages of your documents stand before the question, and the answer cites them">
    <input type="checkbox" name="documents" checked=${isOn} onChange=${(event) => (keep("documents", event.target.checked), changed())} /> Use documents
  </label>`;
}

/** A passage with its place; folded, unless isOpen. */
export function Passage({ of: { number, name, page, headings, text, score, stages }, isOpen = false }) {
  const place = [page ? `page ${page}` : "", (headings ?? []).join(" › ")].filter(Boolean).join(", ");
  const ranks = Object.entries(stages ?? {}).map(([stage, { rank }]) => `${stage} ${rank}`);
  return html`<details class="passage" open=${isOpen}>
    <summary><strong>[${number}]</strong> <bdi>${visible(name)}</bdi>${place && html` <small>${visible(place)}</small>`}</summary>
    <div class="plain" dir="auto">${visible(text)}</div>
    ${ranks.length > 0 && html`<small>${score.toFixed(4)}: ${ranks.join(" · ")}</small>`}
  </details>`;
}

/** What an answer cites, in the order of the markers. */
export function Cited({ node: { cited = [], notes = [] } }) {
  if (!cited.length && !notes.length) return null;
  const passages = [...cited].sort((one, other) => one.number - other.number);
  return html`<div class="cited" role="group" aria-label="Cited passages">
    ${passages.map((one) => html`<${Passage} key=${one.number} of=${one} />`)}
    ${notes.map((note) => html`<small class="dim">${visible(note)}</small>`)}
  </div>`;
}
