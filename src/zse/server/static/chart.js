/* A line chart of the last minutes, as SVG. */

import { html } from "./html.js";

const WIDTH = 300;
const HEIGHT = 90;

/** The next of 1, 2, 5, 10, … that holds a value. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value * (1 - 1e-9)) * power;
}

/** The points of a line; a null is a gap. */
function path(values, count, most) {
  const x = (index) => (WIDTH * (index + count - values.length)) / Math.max(count - 1, 1);
  const y = (value) => HEIGHT * (1 - value / most);
  let text = "";
  values.forEach((value, index) => {
    if (value === null) return;
    const begins = index === 0 || values[index - 1] === null;
    text += `${begins ? "M" : "L"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    // A value between two gaps is a dot.
    if (begins && (values[index + 1] ?? null) === null) text += "h0.1";
  });
  return text;
}

/** series: [{name, values}], of numbers or null, the newest last. count: values that the width has room for. show: a number as text. */
export function Chart({ title, series, count, show, most, seconds }) {
  const known = series.flatMap(({ values }) => values.filter((value) => value !== null));
  const top = most ?? ceiling(Math.max(0, ...known));
  const now = series.map(({ name, values }) => `${name ? `${name} ` : ""}${show(values.at(-1) ?? null)}`).join(", ");
  return html`<figure class="chart">
    <figcaption>
      <span>${title}</span>
      <strong>
        ${series.map(({ name, values }, index) => html`<span class=${`series-${index}`}>${name && html`<small>${name} </small>`}${show(values.at(-1) ?? null)}</span> `)}
      </strong>
    </figcaption>
    <svg viewBox=${`0 -4 ${WIDTH} ${HEIGHT + 8}`} preserveAspectRatio="none" role="img" aria-label=${`${title}: now ${now}`}>
      ${[0, 0.5, 1].map((share) => html`<line class="grid" x1="0" x2=${WIDTH} y1=${HEIGHT * share} y2=${HEIGHT * share} />`)}
      ${series.map(({ values }, index) => html`<path class=${`series-${index}`} d=${path(values, count, top)} />`)}
    </svg>
    <div class="scale"><span>${seconds} s ago</span><span>${known.length > 0 && `top ${show(top)}`}</span></div>
  </figure>`;
}
