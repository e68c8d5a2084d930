/* Tools of the operator's MCP servers: which ones a chat uses, and how each call is confirmed, run and shown. */

import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { call as ask, getJSON } from "./api.js";
import { html } from "./html.js";
import { Code, visible } from "./markdown.js";

const MOST_IN_A_ROW = 16; // calls that run unasked behind one message of the reader
const REFUSED = "The user refused this call.";

/** chat(): the Conversation that is shown. labels(): the servers whose tools it uses. What may run unasked ends with the page. */
export class Toolbox {
  constructor(chat, labels) {
    this.chat = chat;
    this.labels = labels;
    this.found = null; // what GET /v1/mcp/tools answers
    this.byName = new Map(); // as the model calls them
    this.allowed = new Set();
    this.fresh = new WeakSet(); // messages that were answered in this page: calls of others run for a click only
  }

  async load() {
    this.found = await getJSON("/v1/mcp/tools");
    this.extend({});
  }

  /** The fields of a request, with the tools of the chosen servers. Throws an Error with one line. */
  extend(fields) {
    this.byName = new Map();
    const labels = this.labels();
    if (!labels.length) return fields;
    if (!this.found) throw new Error("The server's tools are still being asked for; send again in a moment.");
    const tools = [...(fields.tools ?? [])];
    const taken = new Set(tools.map((tool) => tool.function?.name));
    for (const tool of this.found.data.filter(({ server_label: label }) => labels.includes(label))) {
      // The name of another's tool stays the other's.
      const name = taken.has(tool.name) ? `${tool.server_label}__${tool.name}`.slice(0, 64) : tool.name;
      if (taken.has(name)) continue;
      taken.add(name);
      this.byName.set(name, tool);
      tools.push({ type: "function", function: { name, description: tool.description, parameters: tool.input_schema } });
    }
    return tools.length ? { ...fields, tools } : fields;
  }

  keyOf = (tool) => `${this.chat().id} ${tool.server_label} ${tool.name}`;

  allow(tool) {
    this.allowed.add(this.keyOf(tool));
  }

  mayRun(tool, node) {
    if (!this.fresh.has(node) || node.finish !== "tool_calls" || (tool.needs_approval && !this.allowed.has(this.keyOf(tool)))) return false;
    const chat = this.chat();
    const roles = chat.thread().map((number) => chat.nodes[number].role);
    return roles.slice(roles.lastIndexOf("user")).filter((role) => role === "tool").length < MOST_IN_A_ROW;
  }

  /** The text that the model gets. */
  async run(tool, made, signal) {
    let given;
    try {
      given = JSON.parse(made.arguments || "{}");
    } catch {
      return "The arguments are no JSON.";
    }
    const body = { server_label: tool.server_label, name: tool.name, arguments: given };
    try {
      const { output } = await (await ask("/v1/mcp/call", { body, signal })).json();
      return output;
    } catch (error) {
      if (error.name === "AbortError") throw error;
      return `The call failed: ${error.message}`;
    }
  }
}

/** What answers the calls of `node`: tools of servers, once they may, and the reader for the others. send: takes the results of all. */
export function Results({ calls, node, toolbox, send }) {
  const results = useRef({}); // by index: {runs} or {content}
  const leaving = useRef(null);
  const [, redraw] = useState(0);
  const tools = calls.map((made) => toolbox.byName.get(made.name));
  const put = (index, value) => {
    results.current[index] = value;
    redraw((count) => count + 1);
  };
  const sendAll = () => send(calls.map((made, index) => ({ call_id: made.id, name: made.name, content: results.current[index]?.content ?? "" })));
  const finish = (index, content) => {
    put(index, { content });
    if (tools.every((tool, at) => tool && results.current[at]?.content !== undefined)) sendAll();
  };
  const run = (index) => {
    put(index, { runs: true });
    toolbox.run(tools[index], calls[index], leaving.current.signal).then((content) => finish(index, content), () => {});
  };
  useEffect(() => {
    leaving.current = new AbortController();
    tools.forEach((tool, index) => tool && toolbox.mayRun(tool, node) && run(index));
    return () => leaving.current.abort();
  }, []);
  const submit = (event) => {
    event.preventDefault();
    sendAll();
  };
  const isOpen = tools.some((tool, at) => tool && results.current[at]?.content === undefined);
  return html`<form class="results" onSubmit=${submit}>
    ${calls.map((made, index) =>
      tools[index]
        ? html`<${Question}
            tool=${tools[index]}
            result=${results.current[index]}
            run=${() => run(index)}
            refuse=${() => finish(index, REFUSED)}
            allow=${() => (toolbox.allow(tools[index]), run(index))}
          />`
        : html`<label class="field wide">
            <span>Result of ${visible(made.name)}</span>
            <textarea
              class="code"
              rows="2"
              value=${results.current[index]?.content ?? ""}
              onInput=${(event) => put(index, { content: event.target.value })}
            />
          </label>`,
    )}
    ${tools.some((tool) => !tool) && html`<button class="primary" disabled=${isOpen}>Send results</button>`}
  </form>`;
}

/** The call itself stands above, with its arguments. */
function Question({ tool, result, run, refuse, allow }) {
  const name = html`<b><bdi>${visible(tool.name)}</bdi></b> of <bdi>${visible(tool.server_label)}</bdi>`;
  if (result?.runs) return html`<p class="tool-call" role="status">${name} runs…</p>`;
  if (result) return html`<${Code} text=${result.content} language=${`result of ${tool.name}`} />`;
  return html`<div class="tool-call" role="group" aria-label=${`Call of ${tool.name}`}>
    <span>Run ${name}?</span>
    <button type="button" class="primary" onClick=${run}>Run</button>
    <button type="button" onClick=${refuse}>Refuse</button>
    <button type="button" onClick=${allow}>Always allow in this chat</button>
  </div>`;
}

/** The servers whose tools a chat may use; nothing where there are none, or the key may not. change: takes the labels. */
export function ServerTools({ toolbox, change }) {
  const [, loaded] = useState(0);
  const [error, fail] = useState("");
  useEffect(() => {
    toolbox.load().then(
      () => loaded(1),
      ({ status, message }) => status !== 403 && fail(message),
    );
  }, []);
  const { servers = [], data = [] } = toolbox.found ?? {};
  const chosen = toolbox.labels();
  const toggle = (label) => change(chosen.includes(label) ? chosen.filter((other) => other !== label) : [...chosen, label]);
  if (error) return html`<p class="error">${visible(error)}</p>`;
  if (!servers.length) return null;
  return html`<fieldset class="server-tools">
    <legend>Tools of this server</legend>
    ${servers.map(({ server_label: label, error: failure }) => {
      const names = data.filter((tool) => tool.server_label === label).map(({ name }) => name);
      return html`<label class="check">
        <input type="checkbox" name="server" value=${label} checked=${chosen.includes(label)} onChange=${() => toggle(label)} />
        <span><bdi>${visible(label)}</bdi><small>${visible(failure ?? names.join(", "))}</small></span>
      </label>`;
    })}
  </fieldset>`;
}
