/* Markup of the page: `html` makes preact's nodes of a template. A value in it becomes text or an attribute, never markup. */

import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
