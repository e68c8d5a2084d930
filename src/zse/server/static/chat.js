/* The chat: conversations at the left, messages in the middle, settings at the right. */

import { Component } from "./vendor/preact.js";
import { answer, requestBody } from "./answering.js";
import { getJSON } from "./api.js";
import { Chats } from "./chats.js";
import { DocumentSwitch, grounding } from "./cited.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { BrowserHistory, ServerHistory } from "./history.js";
import { html } from "./html.js";
import { imagesOf, MAX_IMAGES } from "./images.js";
import { Message } from "./message.js";
import { bodyFields, EMPTY, fieldsOf, Settings } from "./settings.js";
import { keep, kept } from "./store.js";
import { ServerTools, Toolbox } from "./tools.js";

const SEARCH_MS = 200; // without another letter, before a search is asked for
const NEAR_END = 80; // CSS pixels from the end within which the page follows the answer

export class Chat extends Component {
  constructor({ models, onServer }) {
    super();
    this.history = onServer ? new ServerHistory() : new BrowserHistory();
    this.settings = { ...EMPTY, ...kept("settings", {}) };
    this.actions.toolbox = new Toolbox(() => this.chat, () => this.settings.servers);
    this.state = {
      chat: new Conversation(),
      cards: [],
      hasMore: false,
      search: "",
      model: models.find((model) => model.id === kept("model", "")) ? kept("model", "") : "",
      text: "",
      images: [], // of the question that is being written: data URIs
      notice: "",
      open: "", // "chats" or "settings": the drawer that a narrow window shows; "settings" is a column of a wide one
      fields: null,
      running: null, // AbortController of the answer that grows
    };
    this.frame = 0;
    this.follows = true;
  }

  get chat() {
    return this.state.chat;
  }

  /** The name of the model that answers next: the one that was chosen, or the server's first. */
  get model() {
    return this.state.model || this.props.models[0]?.id || "";
  }

  /** Whether that model takes images; it may, as long as it is not loaded and nobody knows. */
  get sees() {
    const kinds = this.props.models.find(({ id }) => id === this.model)?.input_modalities;
    return !kinds || kinds.includes("image");
  }

  componentDidMount() {
    document.addEventListener("keydown", this.onKeyDown);
    addEventListener("pagehide", this.leave);
    addEventListener("focus", this.refresh);
    getJSON("/openapi.json").then(
      (document) => this.setState({ fields: fieldsOf(document) }),
      (error) => this.setState({ notice: error.message }),
    );
    if (this.settings.servers.length) {
      this.actions.toolbox.load().then(
        () => this.setState({}),
        (error) => this.say(error.message),
      );
    }
    this.focus();
    this.list().then(() => {
      const [card] = this.state.cards;
      if (card && this.chat.nodes.length === 1) this.open(card.id);
    });
  }

  componentWillUnmount() {
    document.removeEventListener("keydown", this.onKeyDown);
    removeEventListener("pagehide", this.leave);
    removeEventListener("focus", this.refresh);
    clearTimeout(this.timer);
    this.state.running?.abort();
    cancelAnimationFrame(this.frame);
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

  /** What an answer has so far, for the page is left. */
  leave = () => this.state.running && this.save(this.chat);

  save = async (chat) => {
    if (chat.nodes.length === 1 || chat.isDeleted) return;
    try {
      const notice = await this.history.save(chat);
      if (notice) this.say(notice);
      this.setState(({ cards, search }) => ({ cards: [cardOf(chat), ...cards.filter(({ id }) => id !== chat.id)].filter((card) => holds(card, search)) }));
    } catch (error) {
      this.say(`The chat could not be kept: ${error.message}`);
    }
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

  /** Reads the list from its beginning, or what comes behind the card `after`. */
  list = async (after) => {
    const { search } = this.state;
    try {
      const { cards, hasMore } = await this.history.list(search, after);
      if (search === this.state.search) this.setState((state) => ({ cards: after ? [...state.cards, ...cards] : cards, hasMore }));
    } catch (error) {
      if (after && error.status === 400) return this.list(); // that card is gone
      this.say(error.message);
    }
  };

  /** What other tabs have done meanwhile. */
  refresh = async () => {
    if (!this.props.onServer || this.state.running) return;
    await this.list();
    const { chat, cards, running } = this.state;
    const card = cards.find(({ id }) => id === chat.id);
    if (card && card.version > chat.version && !running && !chat.waits) this.open(chat.id);
  };

  start = () => this.show(new Conversation(), () => this.focus());

  open = async (id) => {
    this.wanted = id;
    this.state.running?.abort();
    try {
      const chat = await this.history.open(id);
      if (this.wanted === id) this.show(chat);
    } catch (error) {
      this.say(error.message);
    }
  };

  show(chat, then) {
    this.wanted = chat.id;
    this.state.running?.abort();
    this.follows = true;
    this.setState({ chat, open: "", notice: "" }, then);
  }

  remove = async (id) => {
    const isOpen = id === this.chat.id;
    if (isOpen) {
      this.state.running?.abort();
      this.chat.isDeleted = true;
    }
    try {
      await this.history.remove(id, isOpen ? this.chat.saving : null);
    } catch (error) {
      if (error.status !== 404) return this.say(error.message);
    }
    const at = this.state.cards.findIndex((card) => card.id === id);
    const cards = this.state.cards.filter((card) => card.id !== id);
    this.setState({ cards });
    if (!isOpen) return;
    const next = cards[Math.min(at, cards.length - 1)];
    if (next) this.open(next.id);
    else this.start();
  };

  rename = async (card, title) => {
    try {
      if (card.id === this.chat.id) {
        this.chat.name = title;
        this.setState({});
        return await this.save(this.chat);
      }
      await this.history.rename(card, title);
    } catch (error) {
      this.say(error.status === 409 ? "This chat was changed elsewhere; try again." : error.message);
    }
    await this.list();
  };

  search = (search) => {
    this.setState({ search });
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.list(), SEARCH_MS);
  };

  more = async () => {
    if (this.reads) return;
    this.reads = true;
    await this.list(this.state.cards.at(-1)?.id);
    this.reads = false;
  };

  ofList = { start: this.start, open: this.open, remove: this.remove, rename: this.rename, search: this.search, more: this.more };

  // Messages

  /** Asks for an answer behind message `parent`; whether the request could be made. */
  ask(parent) {
    const chat = this.chat;
    let body;
    try {
      const fields = { ...bodyFields(this.settings), ...grounding() };
      body = requestBody(this.model, this.settings.system, chat.messages(parent), this.actions.toolbox.extend(fields));
    } catch (error) {
      this.say(error.message);
      return false;
    }
    this.follows = true;
    this.wanted = chat.id;
    keep("request", body);
    const node = chat.nodes[chat.add(parent, { role: "assistant", model: this.model, isRunning: true })];
    const running = new AbortController();
    this.setState({ running, notice: "" });
    const changed = () => {
      // One change a frame, however fast tokens come.
      this.frame ||= requestAnimationFrame(() => ((this.frame = 0), this.setState({})));
    };
    this.save(chat); // the question, whatever comes
    this.actions.toolbox.fresh.add(node);
    answer(body, node, changed, running.signal).then(() => {
      this.setState((state) => (state.running === running ? { running: null } : {}));
      this.save(chat);
    });
    return true;
  }

  takeImages = async (files) => {
    const { images, problem } = await imagesOf(files, MAX_IMAGES - this.state.images.length);
    this.setState((state) => ({ images: [...state.images, ...images].slice(0, MAX_IMAGES), notice: problem }));
  };

  removeImage = (index) => this.setState(({ images }) => ({ images: images.filter((_, at) => at !== index) }));

  send = (text) => {
    const chat = this.chat;
    const parent = chat.last();
    const { images } = this.state;
    const number = chat.add(parent, { role: "user", content: text, ...(images.length && { images }) });
    if (this.ask(number)) {
      this.setState({ text: "", images: [] });
    } else {
      chat.nodes.pop();
      chat.nodes[parent].children.pop();
      chat.nodes[parent].shown = 0;
    }
  };

  actions = {
    step: (number, step) => (this.chat.step(number, step), this.setState({}), this.save(this.chat)),
    regenerate: (number) => this.ask(this.chat.nodes[number].parent),
    edit: (number, text) => {
      const { parent, images } = this.chat.nodes[number];
      if (text.trim() || images) this.ask(this.chat.add(parent, { role: "user", content: text, ...(images && { images }) }));
    },
    answerCalls: (number, results) => {
      let parent = number;
      for (const { call_id, name, content } of results) parent = this.chat.add(parent, { role: "tool", call_id, name, content });
      this.ask(parent);
    },
  };

  render({ models }, { chat, cards, hasMore, search, text, images, notice, open, fields, running }) {
    const shown = chat.thread();
    const toggle = (name) => () => this.setState({ open: open === name ? "" : name });
    return html`<div class=${`chat ${open ? `open-${open}` : ""}`}>
      <${Chats} cards=${cards.some(({ id }) => id === chat.id) || search ? cards : [cardOf(chat), ...cards]} current=${chat.id} search=${search} hasMore=${hasMore} actions=${this.ofList} />
      <section class="talk" aria-label="Conversation">
        <div class="bar">
          <button type="button" class="narrow-only" aria-expanded=${open === "chats"} onClick=${toggle("chats")}>Chats</button>
          <${ModelChoice} models=${models} model=${this.model} choose=${this.choose} />
          <${DocumentSwitch} changed=${() => this.setState({})} />
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
          images=${images}
          takeImages=${this.takeImages}
          removeImage=${this.removeImage}
          sees=${this.sees}
          isBusy=${running !== null}
          send=${this.send}
          stop=${() => running?.abort()}
          say=${this.say}
        />
      </section>
      <aside class="drawer right" hidden=${open !== "settings"} aria-label="Settings">
        <header><h2>Settings</h2><button type="button" onClick=${toggle("settings")}>Close</button></header>
        ${open === "settings" && html`<${ServerTools} toolbox=${this.actions.toolbox} change=${(servers) => this.changeSettings({ servers })} />`}
        <${Settings} fields=${fields} settings=${this.settings} change=${this.changeSettings} />
      </aside>
    </div>`;
  }
}

const cardOf = ({ id, title, version }) => ({ id, title, version });

const holds = ({ title }, search) => title.toLowerCase().includes(search.toLowerCase());

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
