/* Asks the model for an answer and lets it grow in its message. */

import { call, events } from "./api.js";
import { takeCitations } from "./cited.js";

/** The body of POST /v1/chat/completions. messages: of a Conversation. chosen: what the reader set, of settings.js: bodyFields. */
export function requestBody(model, system, messages, chosen) {
  const before = system.trim() ? [{ role: "system", content: system }] : [];
  return { model, messages: [...before, ...messages], stream: true, stream_options: { include_usage: true }, ...chosen };
}

/** Streams an answer into `node`, a message of a Conversation; `changed` is called when there is more to show. It never throws: what went wrong
    is node.error, a line. */
export async function answer(body, node, changed, signal) {
  const began = performance.now();
  let first = 0;
  try {
    for await (const chunk of events(await call("/v1/chat/completions", { body, signal }))) {
      first ||= performance.now();
      if (chunk.usage) node.usage = chunk.usage;
      const choice = chunk.choices[0];
      if (choice) take(node, choice);
      takeCitations(node, chunk);
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else node.error = error.message;
  }
  const seconds = (performance.now() - first) / 1000;
  node.first_ms = first ? first - began : null;
  node.per_second = first && seconds > 0 && node.usage?.completion_tokens > 1 ? (node.usage.completion_tokens - 1) / seconds : null;
  node.isRunning = false;
  changed();
}

function take(node, { delta, finish_reason: finish }) {
  node.content += delta.content ?? "";
  node.reasoning = (node.reasoning ?? "") + (delta.reasoning_content ?? "");
  for (const part of delta.tool_calls ?? []) {
    node.calls ??= [];
    const made = (node.calls[part.index] ??= { id: "", name: "", arguments: "" });
    made.id ||= part.id ?? "";
    made.name ||= part.function?.name ?? "";
    made.arguments += part.function?.arguments ?? "";
  }
  if (finish) node.finish = finish;
}
