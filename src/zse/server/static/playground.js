/* A request by hand: its route and body, what curl and Python write for it, and the raw answer. */

import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { getJSON, lines, send } from "./api.js";
import { html } from "./html.js";
import { Code } from "./markdown.js";
import { kept } from "./store.js";

const MAX_SHOWN = 200_000; // letters of an answer
const HEADERS = ["content-type", "x-request-id", "retry-after", "x-ratelimit-remaining-requests", "x-ratelimit-remaining-tokens"];

const examples = (model) => ({
  "/v1/chat/completions": kept("request", { model, messages: [{ role: "user", content: "Hello" }], max_tokens: 64 }),
  "/v1/completions": { model, prompt: "Once upon a time", max_tokens: 64 },
  "/v1/responses": { model, input: "Hello", max_output_tokens: 64 },
  "/v1/messages": { model, messages: [{ role: "user", content: "Hello" }], max_tokens: 64 },
  "/v1/embeddings": { model, input: ["one text", "another"] },
  "/v1/rerank": { model, query: "a question", documents: ["a text", "another"] },
  "/v1/score": { model, text_1: "a text", text_2: "another" },
  "/tokenize": { model, prompt: "Hello" },
  "/detokenize": { model, tokens: [1, 2, 3] },
  "/api/chat": { model, messages: [{ role: "user", content: "Hello" }] },
  "/api/generate": { model, prompt: "Hello" },
});

/** A text within single quotes for a POSIX shell. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The same request as a command. The key is a variable: commands are kept in histories. */
export function asCurl(origin, path, body) {
  return [
    `curl --no-buffer ${quoted(origin + path)}`,
    `  -H "Authorization: Bearer $ZSE_API_KEY"`,
    `  -H 'Content-Type: application/json'`,
    `  -d ${quoted(body)}`,
  ].join(" \\\n");
}

/** The same request as a program of Python's standard library. */
export function asPython(origin, path, body) {
  return [
    "import json",
    "import os",
    "import urllib.request",
    "",
    `body = json.loads(r"""${body}""")`,
    "request = urllib.request.Request(",
    `    ${JSON.stringify(origin + path)},`,
    "    json.dumps(body).encode(),",
    '    {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get(\'ZSE_API_KEY\', \'\')}"},',
    ")",
    "with urllib.request.urlopen(request) as answer:",
    "    for line in answer:",
    '        print(line.decode(), end="")',
    "",
  ].join("\n");
}

export function Playground({ models }) {
  const known = examples(models[0]?.id ?? "");
  const [paths, setPaths] = useState(Object.keys(known));
  const [path, setPath] = useState("/v1/chat/completions");
  const [body, setBody] = useState(JSON.stringify(known[path], null, 2));
  const [shown, setShown] = useState("curl");
  const [reply, setReply] = useState(null);
  const running = useRef(null);

  useEffect(() => {
    getJSON("/openapi.json").then(
      (document) => setPaths(Object.keys(document.paths).filter((name) => document.paths[name].post && !name.includes("{"))),
      () => {},
    );
    return () => running.current?.abort();
  }, []);

  const choose = (name) => {
    setPath(name);
    setBody(JSON.stringify(known[name] ?? {}, null, 2));
    setReply(null);
  };
  const run = async (event) => {
    event.preventDefault();
    running.current = new AbortController();
    const began = performance.now();
    const now = { status: 0, headers: [], text: "", isRunning: true };
    const show = (more) => setReply(Object.assign(now, more) && { ...now, ms: Math.round(performance.now() - began) });
    show({});
    try {
      const response = await send(path, { body, signal: running.current.signal });
      const headers = HEADERS.filter((name) => response.headers.has(name)).map((name) => `${name}: ${response.headers.get(name)}`);
      show({ status: response.status, headers });
      for await (const line of lines(response)) show({ text: `${now.text}${line}\n`.slice(0, MAX_SHOWN) });
    } catch (error) {
      show({ text: `${now.text}${error.name === "AbortError" ? "(stopped)" : error.message}\n` });
    }
    show({ isRunning: false });
  };

  const problem = problemOf(body);
  const compact = problem ? body : JSON.stringify(JSON.parse(body));
  const code = shown === "curl" ? asCurl(location.origin, path, compact) : asPython(location.origin, path, compact);
  return html`<div class="view playground">
    <h1>Playground</h1>
    <form onSubmit=${run}>
      <label class="field wide"><span>Route</span>
        <select value=${path} onChange=${(event) => choose(event.target.value)}>
          ${paths.map((name) => html`<option value=${name}>POST ${name}</option>`)}
        </select>
      </label>
      <label class="field wide"><span>Body</span>
        <textarea class="code" name="body" rows="14" spellcheck=${false} value=${body} onInput=${(event) => setBody(event.target.value)} />
      </label>
      ${problem && html`<p class="error" role="alert">${problem}</p>`}
      ${reply?.isRunning
        ? html`<button type="button" class="primary" onClick=${() => running.current.abort()}>Stop</button>`
        : html`<button class="primary" disabled=${Boolean(problem)}>Send</button>`}
    </form>
    <section>
      <div class="tabs" role="group" aria-label="The request as">
        ${["curl", "python"].map(
          (name) => html`<button type="button" aria-pressed=${name === shown} onClick=${() => setShown(name)}>${name === "curl" ? "curl" : "Python"}</button>`,
        )}
      </div>
      <${Code} text=${code} language=${shown === "curl" ? "sh" : "python"} />
      ${reply && html`<${Reply} reply=${reply} />`}
    </section>
  </div>`;
}

function Reply({ reply }) {
  const { status, ms, headers, text } = reply;
  return html`<div aria-live="polite">
    <h2>${status || "…"} <small>after ${ms} ms</small></h2>
    <${Code} text=${`${headers.join("\n")}\n\n${pretty(text)}`} language="answer" />
  </div>`;
}

function problemOf(body) {
  try {
    JSON.parse(body);
    return "";
  } catch (error) {
    return `The body is not valid JSON: ${error.message}`;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
