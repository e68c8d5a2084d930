/* Where a question is written: Enter sends, Shift+Enter makes a line. Images are refused: no model here takes them. */

import { useLayoutEffect, useRef } from "./vendor/hooks.js";
import { html } from "./html.js";

const MAX_HEIGHT = 240; // CSS pixels, then it scrolls
export const NO_IMAGES = "Images are not sent: the models of this server take text.";

/** send(text) tells whether the text was taken; stop() is there while an answer runs; say(line) shows a notice. */
export function Composer({ text, write, isBusy, send, stop, say }) {
  const area = useRef(null);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight, MAX_HEIGHT)}px`;
  }, [text]);
  const submit = (event) => {
    event?.preventDefault();
    if (!isBusy && text.trim()) send(text);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  const refuseImages = (event, data) => {
    if (!Array.from(data?.files ?? []).length) return;
    event.preventDefault();
    say(NO_IMAGES);
  };
  return html`<form class="composer" onSubmit=${submit}>
    <textarea
      ref=${area}
      id="question"
      rows="1"
      aria-label="Message"
      placeholder="Write a message"
      enterkeyhint="send"
      autocomplete="off"
      value=${text}
      onInput=${(event) => write(event.target.value)}
      onKeyDown=${onKeyDown}
      onPaste=${(event) => refuseImages(event, event.clipboardData)}
      onDragOver=${(event) => event.preventDefault()}
      onDrop=${(event) => refuseImages(event, event.dataTransfer)}
    />
    ${isBusy
      ? html`<button type="button" class="primary" onClick=${stop} title="Stop (Esc)">Stop</button>`
      : html`<button class="primary" disabled=${!text.trim()}>Send</button>`}
  </form>`;
}
