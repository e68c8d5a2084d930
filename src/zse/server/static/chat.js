/* The chat: conversations at the left, messages in the middle, settings at the right. */

import { Component } from "./vendor/preact.js";
import { answer, requestBody } from "./answering.js";
import { getJSON } from "./api.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { html } from "./html.js";
import { Message } from "./message.js";
import { bodyFields, EMPTY, fieldsOf, Settings } from "./settings.js";
import { keep, kept } from "./store.js";

const MAX_CONVERSATIONS = 50;
const NEAR_END = 80; // CSS pixels from the end within which the page follows the answer

export class Chat extends Component {
  constructor({ models }) {
    super();
    const saved = kept("chats", []).map((data) => new Conversation(data));
    this.settings = { ...EMPTY, ...kept("settings", {}) };
    this.state = {
      chats: saved.length ? saved : [new Conversation()],
      at: 0,
      model: models.find((model) => model.id === kept("model", "")) ? kept("model", "") : "",
      text: "",
      notice: "",
      open: "", // "chats" or "settings": the drawer that a narrow window shows; "settings" is a column of a wide one
      fields: null,
      running: null, // AbortController of the answer that grows
    };
    this.frame = 0;
    this.follows = true;
  }

  get chat() {
    return this.state.chats[this.state.at];
  }

  /** The name of the model that answers next: the one that was chosen, or the server's first. */
  get model() {
    return this.state.model || this.props.models[0]?.id || "";
  }

  componentDidMount() {
    document.addEventListener("keydown", this.onKeyDown);
    addEventListener("pagehide", this.save);
    getJSON("/openapi.json").then(
      (document) => this.setState({ fields: fieldsOf(document) }),
      (error) => this.setState({ notice: error.message }),
    );
    this.focus();
  }

  componentWillUnmount() {
    document.removeEventListener("keydown", this.onKeyDown);
    removeEventListener("pagehide", this.save);
    this.state.running?.abort();
    cancelAnimationFrame(this.frame);
    this.save();
  }

  componentDidUpdate() {
    if (this.follows && this.thread) this.thread.scrollTop = this.thread.scrollHeight;
  }

  onKeyDown = (event) => {
    if (event.key !== "Escape" || event.defaultPrevented) return;
    if (this.state.running) this.state.running.abort();
    else if (this.state.open) this.setState({ open: "" });
  };

  onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = this.thread;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR_END;
  };

  focus() {
    // A phone would cover half the page with its keyboard.
    if (matchMedia("(pointer: fine)").matches || !matchMedia("(pointer: coarse)").matches) document.getElementById("question")?.focus();
  }

  say = (notice) => this.setState({ notice });

  save = () => {
    const used = this.state.chats.filter((chat) => chat.nodes.length > 1).slice(0, MAX_CONVERSATIONS);
    // The oldest go until the browser's room suffices.
    while (!keep("chats", used) && used.length) used.pop();
  };

  changeSettings = (some) => {
    this.settings = { ...this.settings, ...some };
    keep("settings", this.settings);
    this.setState({});
  };

  choose = (model) => {
    keep("model", model);
    this.setState({ model });
  };

  // Conversations

  start = () => {
    this.state.running?.abort();
    const chats = this.state.chats.filter((chat) => chat.nodes.length > 1);
    this.setState({ chats: [new Conversation(), ...chats], at: 0, open: "", notice: "" }, () => this.focus());
  };

  open = (at) => {
    this.state.running?.abort();
    this.follows = true;
    this.setState({ at, open: "", notice: "" });
  };

  remove = (at) => {
    if (at === this.state.at) this.state.running?.abort();
    const chats = this.state.chats.filter((_, index) => index !== at);
    const now = at < this.state.at ? this.state.at - 1 : Math.min(this.state.at, Math.max(chats.length - 1, 0));
    this.setState({ chats: chats.length ? chats : [new Conversation()], at: now }, () => this.save());
  };

  // Messages

  /** Asks for an answer behind message `parent`; whether the request could be made. */
  ask(parent) {
    const chat = this.chat;
    let body;
    try {
      body = requestBody(this.model, this.settings.system, chat.messages(parent), bodyFields(this.settings));
    } catch (error) {
      this.say(error.message);
      return false;
    }
    this.follows = true;
    keep("request", body);
    const node = chat.nodes[chat.add(parent, { role: "assistant", model: this.model, isRunning: true })];
    const running = new AbortController();
    this.setState({ running, notice: "" });
    const changed = () => {
      // One change a frame, however fast tokens come.
      this.frame ||= requestAnimationFrame(() => ((this.frame = 0), this.setState({})));
    };
    answer(body, node, changed, running.signal).then(() => {
      this.setState((state) => (state.running === running ? { running: null } : {}));
      this.save();
    });
    return true;
  }

  send = (text) => {
    const chat = this.chat;
    const parent = chat.last();
    const number = chat.add(parent, { role: "user", content: text });
    if (this.ask(number)) {
      this.setState({ text: "" });
    } else {
      chat.nodes.pop();
      chat.nodes[parent].children.pop();
      chat.nodes[parent].shown = 0;
    }
  };

  actions = {
    step: (number, step) => (this.chat.step(number, step), this.setState({}), this.save()),
    regenerate: (number) => this.ask(this.chat.nodes[number].parent),
    edit: (number, text) => text.trim() && this.ask(this.chat.add(this.chat.nodes[number].parent, { role: "user", content: text })),
    answerCalls: (number, results) => {
      let parent = number;
      for (const { callId, name, content } of results) parent = this.chat.add(parent, { role: "tool", callId, name, content });
      this.ask(parent);
    },
  };

  render({ models }, { chats, at, text, notice, open, fields, running }) {
    const chat = this.chat;
    const shown = chat.thread();
    const toggle = (name) => () => this.setState({ open: open === name ? "" : name });
    return html`<div class=${`chat ${open ? `open-${open}` : ""}`}>
      <${Chats} chats=${chats} at=${at} start=${this.start} open=${this.open} remove=${this.remove} />
      <section class="talk" aria-label="Conversation">
        <div class="bar">
          <button type="button" class="narrow-only" aria-expanded=${open === "chats"} onClick=${toggle("chats")}>Chats</button>
          <${ModelChoice} models=${models} model=${this.model} choose=${this.choose} />
          <button type="button" aria-expanded=${open === "settings"} onClick=${toggle("settings")}>Settings</button>
        </div>
        <div class="thread" role="log" aria-live="off" tabindex="0" aria-label="Messages" ref=${(element) => (this.thread = element)} onScroll=${this.onScroll}>
          ${!shown.length && html`<${Welcome} model=${this.model} />`}
          ${shown.map(
            (number, index) =>
              html`<${Message}
                key=${`${chat.id}-${number}`}
                number=${number}
                node=${chat.nodes[number]}
                branch=${chat.branch(number)}
                isLast=${index === shown.length - 1}
                isBusy=${running !== null}
                openCalls=${chat.openCalls(number)}
                actions=${this.actions}
              />`,
          )}
        </div>
        <p class="sr-only" role="status">${running ? "The model answers." : shown.length ? "The answer has ended." : ""}</p>
        ${notice && html`<p class="notice" role="alert">${notice} <button type="button" class="quiet" onClick=${() => this.say("")}>Close</button></p>`}
        <${Composer}
          text=${text}
          write=${(written) => this.setState({ text: written })}
          isBusy=${running !== null}
          send=${this.send}
          stop=${() => running?.abort()}
          say=${this.say}
        />
      </section>
      <aside class="drawer right" hidden=${open !== "settings"} aria-label="Settings">
        <header><h2>Settings</h2><button type="button" onClick=${toggle("settings")}>Close</button></header>
        <${Settings} fields=${fields} settings=${this.settings} change=${this.changeSettings} />
      </aside>
    </div>`;
  }
}

function Chats({ chats, at, start, open, remove }) {
  return html`<aside class="drawer left" aria-label="Chats">
    <button type="button" class="primary" onClick=${start}>New chat</button>
    <ul>
      ${chats.map(
        (chat, index) => html`<li key=${chat.id} class=${index === at ? "current" : ""}>
          <button type="button" class="title" aria-current=${index === at ? "true" : undefined} onClick=${() => open(index)}><bdi>${chat.title}</bdi></button>
          <button type="button" class="quiet" aria-label=${`Delete ${chat.title}`} onClick=${() => remove(index)}>✕</button>
        </li>`,
      )}
    </ul>
  </aside>`;
}

function ModelChoice({ models, model, choose }) {
  return html`<label class="model"><span class="sr-only">Model</span>
    <select name="model" value=${model} onChange=${(event) => choose(event.target.value)}>
      ${models.map(({ id, state }) => html`<option value=${id}>${id}${state !== "loaded" ? ` (${state})` : ""}</option>`)}
    </select>
  </label>`;
}

function Welcome({ model }) {
  return html`<div class="welcome">
    <h1>What would you like to know?</h1>
    <p>${model} answers on this server. Enter sends, Shift+Enter makes a line, Esc stops.</p>
  </div>`;
}
