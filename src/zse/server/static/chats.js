/* The list of chats: search, open, rename, delete; more of them as it is scrolled. */

import { useRef, useState } from "./vendor/hooks.js";
import { html } from "./html.js";
import { visible } from "./markdown.js";

const NEAR_END = 200; // CSS pixels from the end of the list within which more is asked for
export const MAX_TITLE = 200;

/** cards: those that are shown; current: the id of the open chat. actions: start(), open(id), remove(id), rename(card, title), search(text), more(). */
export function Chats({ cards, current, search, hasMore, actions }) {
  const onScroll = ({ currentTarget: { scrollHeight, scrollTop, clientHeight } }) => {
    if (hasMore && scrollHeight - scrollTop - clientHeight < NEAR_END) actions.more();
  };
  return html`<aside class="drawer left" aria-label="Chats" onScroll=${onScroll}>
    <button type="button" class="primary" onClick=${actions.start}>New chat</button>
    <input type="search" aria-label="Search chats by title" placeholder="Search" maxlength=${MAX_TITLE} value=${search} onInput=${(event) => actions.search(event.target.value)} />
    <ul>
      ${cards.map((card) => html`<${Card} key=${card.id} card=${card} isCurrent=${card.id === current} actions=${actions} />`)}
    </ul>
    ${search && !cards.length && html`<p class="dim">No chat has this in its title.</p>`}
    ${hasMore && html`<button type="button" class="quiet" onClick=${actions.more}>Older chats</button>`}
  </aside>`;
}

function Card({ card, isCurrent, actions }) {
  const [draft, edit] = useState(null);
  const isOver = useRef(false); // a box that goes away loses the focus, too
  const title = visible(card.title || "New chat");
  const begin = () => ((isOver.current = false), edit(card.title));
  const done = () => {
    if (isOver.current) return;
    isOver.current = true;
    edit(null);
    if (draft.trim() && draft.trim() !== card.title) actions.rename(card, draft.trim());
  };
  const onKeyDown = (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    if (event.key === "Enter") done();
    else ((isOver.current = true), edit(null));
  };
  if (draft !== null) {
    return html`<li><input aria-label="Title of the chat" maxlength=${MAX_TITLE} value=${draft} onInput=${(event) => edit(event.target.value)} onKeyDown=${onKeyDown} onBlur=${done} ref=${focusOnce} /></li>`;
  }
  return html`<li class=${isCurrent ? "current" : ""}>
    <button type="button" class="title" title=${card.title} aria-current=${isCurrent ? "true" : undefined} onClick=${() => actions.open(card.id)}><bdi>${title}</bdi></button>
    <button type="button" class="quiet" aria-label=${`Rename ${card.title}`} onClick=${begin}>✎</button>
    <button type="button" class="quiet" aria-label=${`Delete ${card.title}`} onClick=${() => actions.remove(card.id)}>✕</button>
  </li>`;
}

/** One function for all renderings, so that the box is focused when it appears and not with each letter. */
function focusOnce(input) {
  input?.focus();
}
