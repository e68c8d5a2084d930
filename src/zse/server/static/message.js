/* One message of a conversation: its text, reasoning, tool calls, what went wrong, and what can be done with it. */

import { useState } from "./vendor/hooks.js";
import { Cited } from "./cited.js";
import { html } from "./html.js";
import { Images } from "./images.js";
import { Code, Copy, Markdown, visible } from "./markdown.js";
import { Results } from "./tools.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

/** node: of the Conversation. branch: {index, count}. isLast: nothing follows. actions: step, edit, regenerate, answerCalls, toolbox. */
export function Message({ node, number, branch, isLast, isBusy, openCalls, actions }) {
  const [draft, edit] = useState(null);
  const isUser = node.role === "user";
  const name = node.role === "assistant" ? (node.model ?? NAMES.assistant) : NAMES[node.role];
  const body =
    draft === null
      ? html`<${Content} node=${node} isLast=${isLast} />`
      : html`<${Editor} draft=${draft} edit=${edit} done=${(text) => (edit(null), actions.edit(number, text))} />`;
  return html`<article class=${`message ${node.role}`} aria-label=${`${name}'s message`} aria-busy=${Boolean(node.isRunning)}>
    <header>${visible(name)}</header>
    ${body}
    ${node.error && html`<p class="error" role="alert">${visible(node.error)}</p>`}
    ${openCalls.length > 0 && !node.isRunning && html`<${Results} calls=${openCalls} node=${node} toolbox=${actions.toolbox} send=${(results) => actions.answerCalls(number, results)} />`}
    ${draft === null &&
    !node.isRunning &&
    html`<footer>
      ${branch.count > 1 && html`<${Branches} branch=${branch} step=${(step) => actions.step(number, step)} isBusy=${isBusy} />`}
      ${node.content && html`<${Copy} text=${node.content} />`}
      ${isUser && html`<button type="button" class="quiet" disabled=${isBusy} onClick=${() => edit(node.content)}>Edit</button>`}
      ${node.role === "assistant" &&
      html`<button type="button" class="quiet" disabled=${isBusy} onClick=${() => actions.regenerate(number)}>Regenerate</button>`}
      <${Figures} node=${node} />
    </footer>`}
  </article>`;
}

function Content({ node, isLast }) {
  if (node.role === "user") {
    return html`<${Images} images=${node.images} />${(node.content || !node.images) && html`<div class="plain" dir="auto">${visible(node.content)}</div>`}`;
  }
  if (node.role === "tool") return html`<${Code} text=${node.content} language=${`result of ${node.name}`} />`;
  const isWaiting = node.isRunning && !node.content && !node.reasoning && !node.calls?.length;
  return html`
    ${node.reasoning && html`<${Reasoning} node=${node} isRunning=${node.isRunning && isLast && !node.content} />`}
    ${node.content && html`<${Markdown} text=${node.content} />`}
    <${Cited} node=${node} />
    ${(node.calls ?? []).map((call) => html`<${Call} call=${call} />`)}
    ${isWaiting && html`<p class="waiting">Waiting for the first token…</p>`}
  `;
}

/** Folded, but for the click of the reader. */
function Reasoning({ node, isRunning }) {
  return html`<details class="reasoning">
    <summary>${isRunning ? "Thinking…" : "Reasoning"}</summary>
    <${Markdown} text=${node.reasoning} />
  </details>`;
}

function Call({ call }) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // The arguments are still coming, or are no JSON: as they are.
  }
  return html`<${Code} text=${shown} language=${`calls ${call.name}`} />`;
}

function Editor({ draft, edit, done }) {
  const onKeyDown = (event) => {
    if (event.key === "Escape") edit(null);
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      done(draft);
    }
  };
  return html`<div class="editor">
    <textarea aria-label="Edit the message" rows="4" value=${draft} onInput=${(event) => edit(event.target.value)} onKeyDown=${onKeyDown} ref=${(area) => area?.focus()} />
    <button type="button" class="primary" onClick=${() => done(draft)}>Send</button>
    <button type="button" onClick=${() => edit(null)}>Cancel</button>
  </div>`;
}

function Branches({ branch: { index, count }, step, isBusy }) {
  return html`<span class="branches" role="group" aria-label="Versions">
    <button type="button" class="quiet" aria-label="Previous version" disabled=${isBusy || index === 0} onClick=${() => step(-1)}>‹</button>
    <span>${index + 1} / ${count}</span>
    <button type="button" class="quiet" aria-label="Next version" disabled=${isBusy || index === count - 1} onClick=${() => step(1)}>›</button>
  </span>`;
}

function Figures({ node }) {
  const { usage, first_ms: firstMs, per_second: perSecond, finish } = node;
  const said = [];
  if (usage) said.push(`${usage.completion_tokens} tokens`);
  if (perSecond > 0) said.push(`${perSecond.toFixed(1)} tokens/s`);
  if (firstMs !== null && firstMs !== undefined) said.push(`first after ${Math.round(firstMs)} ms`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) said.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  if (finish === "length") said.push("cut at max tokens");
  if (finish === "stopped") said.push("stopped");
  return said.length > 0 && html`<span class="figures">${said.join(" · ")}</span>`;
}
