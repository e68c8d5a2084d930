/* Where a question is written: Enter sends, Shift+Enter makes a line; images are pasted, dropped or chosen. */

import { useLayoutEffect, useRef } from "./vendor/hooks.js";
import { html } from "./html.js";
import { ImageChoice, Images } from "./images.js";

const MAX_HEIGHT = 240; // CSS pixels, then it scrolls
export const NO_IMAGES = "Images are not sent: this model takes text.";

/** send(text) tells whether the text was taken; stop() is there while an answer runs; say(line) shows a notice. images: data URIs that go with
    the text; takeImages(files), removeImage(index). sees: whether the model may take images. */
export function Composer({ text, write, images, takeImages, removeImage, sees, isBusy, send, stop, say }) {
  const area = useRef(null);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight, MAX_HEIGHT)}px`;
  }, [text]);
  const isEmpty = !text.trim() && !images.length;
  const submit = (event) => {
    event?.preventDefault();
    if (!isBusy && !isEmpty) send(text);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  const take = (event, data) => {
    const files = Array.from(data?.files ?? []);
    if (!files.length) return;
    event.preventDefault();
    if (sees) takeImages(files);
    else say(NO_IMAGES);
  };
  return html`<form class="composer" onSubmit=${submit}>
    <${Images} images=${images} remove=${removeImage} />
    ${sees && html`<${ImageChoice} take=${takeImages} />`}
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
      onPaste=${(event) => take(event, event.clipboardData)}
      onDragOver=${(event) => event.preventDefault()}
      onDrop=${(event) => take(event, event.dataTransfer)}
    />
    ${isBusy
      ? html`<button type="button" class="primary" onClick=${stop} title="Stop (Esc)">Stop</button>`
      : html`<button class="primary" disabled=${isEmpty}>Send</button>`}
  </form>`;
}
