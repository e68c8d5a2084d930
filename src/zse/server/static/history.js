/* Where chats are kept: on the server, where it has a database and asks for a key; else in the browser. Both kinds have the same methods.
   A card is what the list shows of a chat: {id, title, version}. */

import { call, getJSON } from "./api.js";
import { Conversation } from "./conversation.js";
import { apiKey, keep, kept, newId } from "./store.js";

const MAX_CONVERSATIONS = 50; // in a browser
const CARDS = 30; // asked for at once
const KEEPALIVE_LETTERS = 20_000; // browsers send 64 KiB at most for a page that is left, of up to three bytes a letter

/** Whether this server keeps the chats of this key. */
export async function keepsChats() {
  if (!apiKey()) return false;
  try {
    await getJSON("/v1/chats?limit=1");
    return true;
  } catch (error) {
    if (error.status === 400 || error.status === 403 || error.status === 404) return false;
    throw error;
  }
}

export class BrowserHistory {
  constructor() {
    this.chats = kept("chats", []).map((data) => new Conversation(data));
  }

  /** {cards, hasMore}: those whose title holds `search`, the last changed first, behind the id `after`. */
  async list(search) {
    const wanted = search.toLowerCase();
    return { cards: this.chats.filter(({ title }) => title.toLowerCase().includes(wanted)).map(({ id, title }) => ({ id, title, version: 0 })), hasMore: false };
  }

  /** The Conversation of a card. */
  async open(id) {
    return this.chats.find((chat) => chat.id === id) ?? new Conversation();
  }

  /** Keeps a Conversation as it is now; a line for the reader, where there is something to say. */
  async save(chat) {
    this.chats = [chat, ...this.chats.filter(({ id }) => id !== chat.id)].slice(0, MAX_CONVERSATIONS);
    this.write();
    return "";
  }

  async rename({ id }, name) {
    (await this.open(id)).name = name;
    this.write();
  }

  async remove(id) {
    this.chats = this.chats.filter((chat) => chat.id !== id);
    this.write();
  }

  write() {
    // The oldest go until the browser's room suffices; for images it has none.
    while (!keep("chats", this.chats.map((chat) => chat.stored(false))) && this.chats.length) this.chats.pop();
  }
}

const path = (id) => `/v1/chats/${encodeURIComponent(id)}`;

async function post(id, body) {
  const text = JSON.stringify(body);
  return (await call(path(id), { body: text, keepalive: text.length < KEEPALIVE_LETTERS })).json();
}

export class ServerHistory {
  async list(search, after) {
    const query = new URLSearchParams({ limit: CARDS });
    if (search) query.set("search", search);
    if (after) query.set("after", after);
    const { data, has_more: hasMore } = await getJSON(`/v1/chats?${query}`);
    return { cards: data, hasMore };
  }

  async open(id) {
    const { title, version, messages } = await getJSON(path(id));
    const chat = new Conversation({ id, version, nodes: messages });
    if (chat.title !== title) chat.name = title;
    return chat;
  }

  /** One at a time; what waits takes the chat as it is when its turn comes. */
  save(chat) {
    if (!chat.waits) {
      const before = chat.saving ?? Promise.resolve();
      chat.waits = chat.saving = before.catch(() => {}).then(() => ((chat.waits = null), this.write(chat)));
    }
    return chat.saving;
  }

  async write(chat) {
    const { name, title, nodes } = { title: chat.title, ...chat.stored() };
    const made = (version) => post(chat.id, { version, title: name || title, messages: nodes });
    try {
      chat.version = (await made(chat.version)).version;
      return "";
    } catch (error) {
      // Another tab, or another key of the tenant, was first: nothing of either is lost.
      if (error.status === 404) {
        chat.version = (await made(0)).version;
        return "This chat was deleted elsewhere; it is kept again.";
      }
      if (error.status !== 409) throw error;
      chat.id = newId();
      chat.name = `${title.slice(0, 190)} (copy)`;
      chat.version = (await post(chat.id, { version: 0, title: chat.name, messages: nodes })).version;
      return "This chat was changed elsewhere; what stands here is kept as a copy.";
    }
  }

  async rename({ id, version }, title) {
    await post(id, { version, title });
  }

  async remove(id, saving) {
    await saving?.catch(() => {});
    await call(path(id), { method: "DELETE" });
  }
}
