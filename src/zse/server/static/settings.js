/* What the reader sets for answers. Names, ranges and explanations of the fields come from the server's own document of its API. */

import { html } from "./html.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "thinking_budget",
];
const EFFORT = "reasoning_effort";
export const EMPTY = { system: "", numbers: {}, stop: "", effort: "", tools: "", schema: "", servers: [] };

/** Schemas of the fields of /v1/chat/completions, by name, out of GET /openapi.json. */
export function fieldsOf(document) {
  return document.paths["/v1/chat/completions"].post.requestBody.content["application/json"].schema.properties;
}

/** The JSON of a box that may be empty. Throws an Error with one line that names the box. */
function readJSON(text, box, isWanted, wanted) {
  if (!text.trim()) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${box} is not valid JSON: ${error.message}`);
  }
  if (!isWanted(value)) throw new Error(`${box} must be ${wanted}.`);
  return value;
}

/** A tool as the API takes it: {"type": "function", …}, or the function alone. */
const asTool = (tool) => (tool.type === "function" ? tool : { type: "function", function: tool });

/** The fields of a body. Throws an Error that says in one line what is wrong. */
export function bodyFields(settings) {
  const found = {};
  for (const name of NUMBERS) {
    const text = settings.numbers[name] ?? "";
    if (text === "") continue;
    const number = Number(text);
    if (!Number.isFinite(number)) throw new Error(`${name} must be a number.`);
    found[name] = number;
  }
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) found.stop = stops;
  if (settings.effort) found[EFFORT] = settings.effort;
  const tools = readJSON(settings.tools, "Tools", Array.isArray, "a list of functions");
  if (tools?.length) found.tools = tools.map(asTool);
  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  const schema = readJSON(settings.schema, "The schema", isObject, "a JSON schema, an object");
  if (schema) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return found;
}

function label(name) {
  const text = name.replaceAll("_", " ");
  return text[0].toUpperCase() + text.slice(1);
}

function NumberField({ name, schema, value, set }) {
  const isWhole = schema.type?.includes("integer");
  const least = schema.minimum ?? schema.exclusiveMinimum;
  const range = { min: Math.abs(least) > 2 ** 52 ? undefined : least, max: schema.maximum > 2 ** 52 ? undefined : schema.maximum };
  return html`<label class="field" title=${schema.description}>
    <span>${label(name)}</span>
    <input
      type="number"
      inputmode="decimal"
      name=${name}
      value=${value}
      placeholder="model's own"
      step=${isWhole ? 1 : "any"}
      ...${range}
      onInput=${(event) => set(event.target.value)}
    />
  </label>`;
}

function Box({ title, note, name, value, set, rows = 4, isCode = false }) {
  return html`<label class="field wide">
    <span>${title}</span>
    <textarea
      name=${name}
      rows=${rows}
      class=${isCode ? "code" : ""}
      spellcheck=${!isCode}
      value=${value}
      onInput=${(event) => set(event.target.value)}
    />
    ${note && html`<small>${note}</small>`}
  </label>`;
}

/** The form. fields: of fieldsOf(), or null while they are not known. change: takes the settings that changed. */
export function Settings({ fields, settings, change }) {
  const set = (name) => (value) => change({ [name]: value });
  const setNumber = (name) => (value) => change({ numbers: { ...settings.numbers, [name]: value } });
  const known = fields ?? {};
  const efforts = known[EFFORT]?.anyOf?.[0]?.enum ?? [];
  return html`<form class="settings" aria-label="Settings" onSubmit=${(event) => event.preventDefault()}>
    <${Box} title="System prompt" name="system" value=${settings.system} set=${set("system")} rows=${4} />
    <fieldset>
      <legend>Sampling</legend>
      ${NUMBERS.filter((name) => known[name]).map(
        (name) =>
          html`<${NumberField} key=${name} name=${name} schema=${known[name]} value=${settings.numbers[name] ?? ""} set=${setNumber(name)} />`,
      )}
      ${efforts.length > 0 &&
      html`<label class="field" title=${known[EFFORT].description}>
        <span>Reasoning</span>
        <select name=${EFFORT} value=${settings.effort} onChange=${(event) => set("effort")(event.target.value)}>
          <option value="">model's own</option>
          ${efforts.map((effort) => html`<option value=${effort}>${effort}</option>`)}
        </select>
      </label>`}
    </fieldset>
    <${Box} title="Stop strings" name="stop" note="One a line, up to 4." value=${settings.stop} set=${set("stop")} rows=${2} />
    <${Box}
      title="Tools"
      name="tools"
      note='A list of functions: [{"name": …, "description": …, "parameters": schema}]. You answer the calls.'
      value=${settings.tools}
      set=${set("tools")}
      isCode
    />
    <${Box}
      title="Form of the answer"
      name="schema"
      note="A JSON schema; the answer fits it."
      value=${settings.schema}
      set=${set("schema")}
      isCode
    />
    <button type="button" onClick=${() => change(EMPTY)}>Reset</button>
  </form>`;
}
