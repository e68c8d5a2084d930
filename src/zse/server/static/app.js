/* The page: login, navigation, and the views. */

import { render, Component } from "./vendor/preact.js";
import { getJSON, hooks, send } from "./api.js";
import { Chat } from "./chat.js";
import { Dashboard } from "./dashboard.js";
import { Documents } from "./documents.js";
import { keepsChats } from "./history.js";
import { html } from "./html.js";
import { Keys } from "./keys.js";
import { Logs } from "./logs.js";
import { Models } from "./models.js";
import { Playground } from "./playground.js";
import { apiKey, forgetAll, keep, kept, logOut, setApiKey } from "./store.js";

const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };
// Name in the address: title, component, whether it needs an admin's key.
const VIEWS = {
  chat: ["Chat", Chat, false],
  documents: ["Documents", Documents, false],
  dashboard: ["Dashboard", Dashboard, true],
  models: ["Models", Models, false],
  keys: ["Keys", Keys, true],
  logs: ["Logs", Logs, true],
  playground: ["Playground", Playground, false],
};

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  keep("theme", theme);
}

const viewOf = () => (Object.hasOwn(VIEWS, location.hash.slice(1)) ? location.hash.slice(1) : "chat");

class App extends Component {
  state = { view: viewOf(), models: null, isAdmin: false, onServer: false, needsKey: false, error: "", theme: kept("theme", "auto") };

  componentDidMount() {
    hooks.unauthorized = () => this.setState({ needsKey: true });
    addEventListener("hashchange", () => this.setState({ view: viewOf() }));
    this.load();
  }

  /** Reads what the key may see; a key that may not is asked for again. */
  load = async () => {
    try {
      const { data } = await getJSON("/v1/models");
      const { status } = await send("/metrics", { method: "HEAD" });
      this.setState({ models: data, isAdmin: status === 200, onServer: await keepsChats(), needsKey: false, error: "" });
    } catch (error) {
      this.setState({ error: error.status === 401 && !apiKey() ? "" : error.message, needsKey: error.status === 401 });
    }
  };

  /** A view that fails, for what the browser kept of an older page say, must not leave an empty one behind. */
  componentDidCatch(error) {
    this.setState({ broken: error.message });
  }

  logIn = (key) => {
    setApiKey(key);
    this.load();
  };

  logOut = () => {
    logOut();
    location.hash = "";
    location.reload();
  };

  setTheme = (theme) => {
    setTheme(theme);
    this.setState({ theme });
  };

  render(_, { view, models, isAdmin, onServer, needsKey, error, theme, broken }) {
    if (broken) return html`<main class="centre"><${Failure} error=${`This page failed: ${broken}`} again=${startOver} label="Forget what is kept here and start over" /></main>`;
    if (needsKey) return html`<${Login} logIn=${this.logIn} error=${error} />`;
    if (models === null) return html`<main class="centre">${error ? html`<${Failure} error=${error} again=${this.load} />` : "Loading…"}</main>`;
    const [, View, ofAdmin] = VIEWS[view];
    return html`
      <a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.getElementById("main").focus())}>To the content</a>
      <header class="top">
        <span class="brand">ZSE</span>
        <nav aria-label="Views">
          ${Object.entries(VIEWS).map(
            ([name, [title]]) => html`<a href=${`#${name}`} aria-current=${name === view ? "page" : undefined}>${title}</a>`,
          )}
        </nav>
        <label class="theme"><span class="sr-only">Colours</span>
          <select value=${theme} onChange=${(event) => this.setTheme(event.target.value)}>
            ${Object.entries(THEMES).map(([name, title]) => html`<option value=${name}>${title}</option>`)}
          </select>
        </label>
        ${apiKey() && html`<button type="button" onClick=${this.logOut}>Log out</button>`}
      </header>
      <main id="main" tabindex="-1">
        ${ofAdmin && !isAdmin
          ? html`<p class="centre">This view needs an admin's key.</p>`
          : html`<${View} key=${view} models=${models} isAdmin=${isAdmin} onServer=${onServer} reload=${this.load} />`}
      </main>
    `;
  }
}

function Failure({ error, again, label = "Try again" }) {
  return html`<div><p class="error" role="alert">${error}</p><button type="button" onClick=${again}>${label}</button></div>`;
}

function startOver() {
  forgetAll();
  location.reload();
}

function Login({ logIn, error }) {
  const submit = (event) => {
    event.preventDefault();
    logIn(new FormData(event.target).get("key").trim());
  };
  return html`<main class="centre">
    <form class="login" onSubmit=${submit}>
      <h1>ZSE</h1>
      <label class="field wide">
        <span>API key</span>
        <input type="password" name="key" required autocomplete="off" autofocus ref=${(input) => input?.focus()} />
      </label>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <button class="primary">Log in</button>
      <p><small>The key stays in this tab until it is closed.</small></p>
    </form>
  </main>`;
}

setTheme(kept("theme", "auto"));
render(html`<${App} />`, document.getElementById("app"));
