/* Images of a question: taken from files, made small enough to be sent, shown, put away again. */

import { useRef } from "./vendor/hooks.js";
import { html } from "./html.js";

const MAX_SIDE = 1536; // pixels; models look at about as many
const MAX_BYTES = 512 << 10; // of a file that is sent as it is
const SENT = ["image/png", "image/jpeg", "image/webp"];
export const MAX_IMAGES = 8; // of one question

/** A file as a data URI of at most MAX_SIDE pixels a side; another kind or a larger one becomes a JPEG on white. Throws where the browser reads no
    image in it. */
async function dataURI(file) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(picture.width, picture.height));
  if (scale === 1 && file.size <= MAX_BYTES && SENT.includes(file.type)) return asItIs(file);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const place = canvas.getContext("2d");
  place.fillStyle = "#fff";
  place.fillRect(0, 0, canvas.width, canvas.height);
  place.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.85);
}

function asItIs(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** {images, problem}: the data URIs of files, with what is to be said of those that are none. */
export async function imagesOf(files, room) {
  const images = [];
  let problem = files.length > room ? `A question has at most ${MAX_IMAGES} images.` : "";
  for (const file of files.slice(0, room)) {
    try {
      images.push(await dataURI(file));
    } catch {
      problem = `${file.name} is no image that this browser reads.`;
    }
  }
  return { images, problem };
}

/** The images of a message, or of a question that is being written: remove(index). */
export function Images({ images, remove }) {
  if (!images?.length) return null;
  return html`<div class="images">
    ${images.map(
      (address, index) =>
        // What another wrote into a kept chat is no reason to ask another place.
        address.startsWith("data:image/") &&
        html`<figure>
          <img src=${address} alt=${`Image ${index + 1}`} />
          ${remove && html`<button type="button" class="quiet" aria-label=${`Remove image ${index + 1}`} onClick=${() => remove(index)}>✕</button>`}
        </figure>`,
    )}
  </div>`;
}

/** take(files). */
export function ImageChoice({ take }) {
  const input = useRef(null);
  const chosen = () => {
    take([...input.current.files]);
    input.current.value = "";
  };
  return html`<input type="file" accept="image/*" multiple hidden ref=${input} onChange=${chosen} />
    <button type="button" aria-label="Add images" title="Add images (or paste, or drop them)" onClick=${() => input.current.click()}>Image</button>`;
}
