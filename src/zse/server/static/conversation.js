/* A conversation is a tree of messages: an answer that is made again, or a question that is edited, is one more child of the message before
   it, and one path from the root is shown. Nothing here touches the page or the server. */

import { newId } from "./store.js";

const TITLE_LETTERS = 60;

/** nodes: messages by number, the root first; each {parent, children, shown (index of the child on the path), role, content, …}.
    name: a title that the reader gave it. version: of the server's copy, 0 where it has none. */
export class Conversation {
  constructor({ id = newId(), name = "", version = 0, nodes = [{ parent: -1, shown: 0, role: "root" }] } = {}) {
    this.id = id;
    this.name = name;
    this.version = version;
    this.nodes = nodes.map((node) => ({ content: "", ...node, children: [] }));
    this.nodes.forEach(({ parent }, number) => number && this.nodes[parent].children.push(number));
  }

  /** What is kept: {id, name, nodes}. An answer that has no word yet is none. */
  stored(hasImages = true) {
    const count = this.nodes.length - (this.nodes.at(-1).isRunning && !this.nodes.at(-1).content ? 1 : 0);
    const nodes = this.nodes.slice(0, count).map(({ children, isRunning, shown, usage, images, ...node }) => {
      const kept = children.filter((child) => child < count).length;
      const pictures = images && hasImages ? { images } : {};
      return { ...node, ...pictures, shown: Math.min(shown, Math.max(kept - 1, 0)), usage: usage && figures(usage) };
    });
    return { id: this.id, name: this.name, nodes };
  }

  get title() {
    if (this.name) return this.name;
    const first = this.thread().find((number) => this.nodes[number].role === "user");
    const text = first === undefined ? "" : this.nodes[first].content.trim().replace(/\s+/g, " ");
    const none = first !== undefined && this.nodes[first].images ? "Image" : "New chat";
    return text.length > TITLE_LETTERS ? `${text.slice(0, TITLE_LETTERS)}…` : text || none;
  }

  /** Numbers of the messages that are shown, in order. */
  thread() {
    const found = [];
    for (let node = this.nodes[0]; node.children.length; node = this.nodes[found.at(-1)]) {
      found.push(node.children[node.shown]);
    }
    return found;
  }

  /** The last message of the path; the root, 0, of an empty conversation. */
  last() {
    return this.thread().at(-1) ?? 0;
  }

  /** Adds a message behind `parent` and shows it; its number. */
  add(parent, message) {
    const number = this.nodes.length;
    this.nodes.push({ parent, children: [], shown: 0, content: "", ...message });
    this.nodes[parent].shown = this.nodes[parent].children.push(number) - 1;
    return number;
  }

  /** {index, count} of a message among those that stand in its place. */
  branch(number) {
    const { children } = this.nodes[this.nodes[number].parent];
    return { index: children.indexOf(number), count: children.length };
  }

  /** Shows the branch beside a message: step 1 the next one, -1 the one before. */
  step(number, step) {
    const parent = this.nodes[this.nodes[number].parent];
    const index = parent.children.indexOf(number) + step;
    if (index >= 0 && index < parent.children.length) parent.shown = index;
  }

  /** The messages from the root to `number`, as /v1/chat/completions takes them. Reasoning is not sent back, nor is an answer that failed before
      its first word. */
  messages(number) {
    const found = [];
    for (let at = number; at > 0; at = this.nodes[at].parent) found.push(this.nodes[at]);
    return found.reverse().filter((node) => !node.error || node.content).map(asMessage);
  }

  /** Calls of a message that no tool message answers yet. */
  openCalls(number) {
    const { calls = [], children, shown } = this.nodes[number];
    return children.length && this.nodes[children[shown]].role === "tool" ? [] : calls;
  }
}

function figures({ prompt_tokens, completion_tokens, prompt_tokens_details: details }) {
  return { prompt_tokens, completion_tokens, prompt_tokens_details: { cached_tokens: details?.cached_tokens ?? 0 } };
}

function asMessage({ role, content, images, calls, call_id }) {
  if (images?.length) {
    const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
  }
  if (role === "tool") return { role, content, tool_call_id: call_id };
  if (!calls?.length) return { role, content };
  const made = calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return { role, content, tool_calls: made };
}
