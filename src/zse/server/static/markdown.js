/* A model's text as nodes of the page: Markdown, code and formulas. Nothing in it is taken for HTML, loads anything, or runs. */

import { Component } from "./vendor/preact.js";
import { useState } from "./vendor/hooks.js";
import { blocks } from "./blocks.js";
import { html } from "./html.js";
import { inline, safeLink } from "./inline.js";
import { Maths } from "./maths.js";

// Characters that turn the direction of what follows, so that text reads as something else (CVE-2021-42574): shown by number.
const TURNS = /[\u202a-\u202e\u2066-\u2069]/g;

/** Text with its direction controls made visible. */
export function visible(text) {
  if (text.search(TURNS) < 0) return text;
  const found = [];
  let at = 0;
  for (const turn of text.matchAll(TURNS)) {
    const code = `U+${turn[0].codePointAt(0).toString(16).toUpperCase()}`;
    found.push(text.slice(at, turn.index), html`<span class="control" title="a character that changes the direction of text">${code}</span>`);
    at = turn.index + 1;
  }
  return [...found, text.slice(at)];
}

/** A text; while it grows, only blocks that changed are made again. */
export function Markdown({ text }) {
  return html`<div class="markdown" dir="auto">
    ${blocks(text).map((block, index) => html`<${Kept} key=${index} block=${block} />`)}
  </div>`;
}

class Kept extends Component {
  shouldComponentUpdate({ block }) {
    return block.source !== this.props.block.source || block.isOpen !== this.props.block.isOpen;
  }

  /** A text that this page fails at stays readable, and so does the rest. */
  componentDidCatch() {
    this.setState({ isPlain: true });
  }

  render({ block }, { isPlain }) {
    return isPlain ? html`<p class="plain">${visible(block.source)}</p>` : shownBlock(block);
  }
}

const shownBlocks = (found) => found.map(shownBlock);

function shownBlock(block) {
  switch (block.kind) {
    case "code":
      return html`<${Code} text=${block.text} language=${block.language} />`;
    case "maths":
      return html`<div class="formula"><${Maths} text=${block.text} isDisplay=${true} /></div>`;
    case "heading":
      // A page has one first heading, its own.
      return html`<${`h${Math.min(block.level + 2, 6)}`} class=${`level-${block.level}`}>${shownInline(block.text)}<//>`;
    case "rule":
      return html`<hr />`;
    case "quote":
      return html`<blockquote>${shownBlocks(block.blocks)}</blockquote>`;
    case "list":
      return shownList(block);
    case "table":
      return shownTable(block);
    default:
      return html`<p>${shownInline(block.text)}</p>`;
  }
}

function shownList({ isOrdered, start, items, isLoose }) {
  const content = (item) =>
    isLoose ? shownBlocks(item.blocks) : item.blocks.map((block) => (block.kind === "paragraph" ? shownInline(block.text) : shownBlock(block)));
  const box = (item) => item.checked !== null && html`<input type="checkbox" disabled checked=${item.checked} aria-label="task" /> `;
  const rows = items.map((item) => html`<li class=${item.checked === null ? "" : "task"}>${box(item)}${content(item)}</li>`);
  return isOrdered ? html`<ol start=${start}>${rows}</ol>` : html`<ul>${rows}</ul>`;
}

function shownTable({ head, aligns, rows }) {
  const cell = (tag) => (text, index) => html`<${tag} class=${aligns[index]}>${shownInline(text)}<//>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="table">
    <table>
      <thead><tr>${head.map(cell("th"))}</tr></thead>
      <tbody>${rows.map((row) => html`<tr>${row.map(cell("td"))}</tr>`)}</tbody>
    </table>
  </div>`;
}

/** Code with its language and a button that copies it. */
export function Code({ text, language }) {
  return html`<figure class="code">
    <figcaption><span>${visible(language || "text")}</span><${Copy} text=${text} /></figcaption>
    <pre tabindex="0" dir="ltr"><code>${visible(text)}</code></pre>
  </figure>`;
}

/** A button that copies a text. */
export function Copy({ text, label = "Copy" }) {
  const [said, say] = useState("");
  const copy = async () => {
    say((await copied(text)) ? "Copied" : "Not allowed");
    setTimeout(() => say(""), 1500);
  };
  return html`<button type="button" class="quiet" onClick=${copy} aria-live="polite">${said || label}</button>`;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain HTTP from another machine there is no clipboard: the old way.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    return isDone;
  }
}

const shownInline = (text) => inline(text).map(shownPart);

function shownPart(part) {
  if (typeof part === "string") return visible(part);
  const inside = part.children?.map(shownPart);
  switch (part.kind) {
    case "code":
      return html`<code dir="ltr">${visible(part.text)}</code>`;
    case "maths":
      return html`<${Maths} text=${part.text} isDisplay=${part.isDisplay} />`;
    case "strong":
      return html`<strong>${inside}</strong>`;
    case "emphasis":
      return html`<em>${inside}</em>`;
    case "deleted":
      return html`<del>${inside}</del>`;
    case "break":
      return html`<br />`;
    default:
      return shownLink(part, inside);
  }
}

/** A link that may be followed says where it leads; another one is its text. An image is a link to it: to load it would tell its server
    what was asked here. */
function shownLink({ address, isImage }, inside) {
  const target = safeLink(address);
  const text = isImage ? ["image: ", ...inside] : inside;
  if (target === null) return html`<bdi>${text}</bdi>`;
  const host = new URL(target).host || target.slice(7);
  const isNamed = inside.length === 1 && typeof inside[0] === "string" && inside[0].includes(host);
  return html`<a href=${target} target="_blank" rel="noopener noreferrer nofollow"><bdi>${text}</bdi></a>
    ${!isNamed && html`<span class="host"> (${host})</span>`}`;
}
