/* TeX's mathematics, the part that models write, as MathML. What is not known is shown as it was written. */

import { html } from "./html.js";
import {
  ACCENTS, ALPHABETS, FENCES, FUNCTIONS, INTEGRALS, LARGE, LETTERS, LIMITS, OLDER, OPERATORS, SPACES, UNDER,
} from "./symbols.js";

const MAX_DEPTH = 32;
const MAX_LETTERS = 20_000;
const TOKEN = /\\(?:[A-Za-z]+\*?|[\s\S])|\d+(?:\.\d+)?|\s+|%[^\n]*|[\s\S]/gu;
const ALIASES = new Map([["mathbfit", "boldsymbol"], ["bm", "boldsymbol"], ["bold", "mathbf"], ["pmb", "boldsymbol"], ["Bbb", "mathbb"]]);
const UPRIGHT = new Set(["mathrm", "text", "textrm", "textbf", "textit", "texttt", "textsf", "mbox", "hbox", "operatorname", "operatorname*", "mathit"]);
const MATRICES = new Map([
  ["pmatrix", ["(", ")"]], ["bmatrix", ["[", "]"]], ["Bmatrix", ["{", "}"]], ["vmatrix", ["|", "|"]], ["Vmatrix", ["‖", "‖"]], ["cases", ["{", ""]],
]);
const IGNORED = new Set(
  "displaystyle textstyle scriptstyle limits nolimits left. right. nonumber notag big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle hline strut".split(" "),
);

/** A formula. isDisplay: it stands on a line of its own. */
export function Maths({ text, isDisplay }) {
  if (text.length > MAX_LETTERS) return html`<code>${text}</code>`;
  return html`<math display=${isDisplay ? "block" : "inline"} aria-label=${text}>${new Parser(text, isDisplay).row()}</math>`;
}

const own = (table, name) => (Object.hasOwn(table, name) ? table[name] : undefined); // names come from the model: "constructor" is one
const hasLimits = (name) => own(LARGE, name) ?? own(LIMITS, name) ?? name === "operatorname*";
const row = (nodes) => (nodes.length === 1 ? nodes[0] : html`<mrow>${nodes}</mrow>`);
const operator = (text, stretches = false) => html`<mo stretchy=${stretches ? "true" : "false"}>${text}</mo>`;
const space = (em) => html`<mspace width=${`${em}em`} />`;

/** The letters of a text in one of Unicode's alphabets. */
function inAlphabet(name, text) {
  const [capital, small, digit] = ALPHABETS[name];
  const shifted = (letter, from, base) => String.fromCodePoint(base + letter.charCodeAt(0) - from.charCodeAt(0));
  return Array.from(text, (letter) => {
    if (OLDER[name]?.[letter]) return OLDER[name][letter];
    if (/[A-Z]/.test(letter)) return shifted(letter, "A", capital);
    if (/[a-z]/.test(letter)) return shifted(letter, "a", small);
    return digit && /\d/.test(letter) ? shifted(letter, "0", digit) : letter;
  }).join("");
}

class Parser {
  constructor(text, isDisplay) {
    this.tokens = text.match(TOKEN) ?? [];
    this.isDisplay = isDisplay;
    this.at = 0;
    this.depth = 0;
  }

  get token() {
    return this.tokens[this.at];
  }

  skipSpace() {
    while (this.at < this.tokens.length && /^(\s|%)/.test(this.token)) this.at += 1;
  }

  next() {
    this.skipSpace();
    this.at += 1;
    return this.tokens[this.at - 1];
  }

  /** Everything up to a token of `ends`, which is left; an end that belongs to nobody is shown. */
  row(...ends) {
    const found = [];
    for (this.skipSpace(); this.at < this.tokens.length && !ends.includes(this.token); this.skipSpace()) {
      const before = this.at;
      const node = this.scripted();
      if (node !== null) found.push(node);
      if (this.at === before) this.at += 1;
    }
    return row(found);
  }

  /** An atom with what stands at its right, below and above. */
  scripted() {
    const name = this.token;
    let base = name === "^" || name === "_" ? html`<mrow />` : this.atom();
    let below = null;
    let above = null;
    let primes = "";
    for (this.skipSpace(); ; this.skipSpace()) {
      if (this.token === "^" && above === null) above = this.argumentAfter();
      else if (this.token === "_" && below === null) below = this.argumentAfter();
      else if (this.token === "'") primes += "′", (this.at += 1);
      else if (this.token === "\\limits" || this.token === "\\nolimits") this.at += 1;
      else break;
    }
    if (primes) above = above === null ? operator(primes) : html`<mrow>${operator(primes)}${above}</mrow>`;
    if (below === null && above === null) return base;
    base ??= html`<mrow />`;
    const bare = name?.slice(1);
    const isStacked = /^\\(over|under)brace$/.test(name) || (this.isDisplay && hasLimits(bare));
    if (above === null) return isStacked ? html`<munder>${base}${below}</munder>` : html`<msub>${base}${below}</msub>`;
    if (below === null) return isStacked ? html`<mover>${base}${above}</mover>` : html`<msup>${base}${above}</msup>`;
    return isStacked
      ? html`<munderover>${base}${below}${above}</munderover>`
      : html`<msubsup>${base}${below}${above}</msubsup>`;
  }

  argumentAfter() {
    this.at += 1;
    return this.argument();
  }

  /** What a command takes: a group, or one atom. */
  argument() {
    this.skipSpace();
    if (this.at >= this.tokens.length) return html`<mrow />`;
    return this.token === "{" ? this.group() : (this.atom() ?? html`<mrow />`);
  }

  group() {
    this.at += 1;
    if (this.depth >= MAX_DEPTH) return html`<mtext>{</mtext>`;
    this.depth += 1;
    const inner = this.row("}");
    this.depth -= 1;
    this.at += 1;
    return html`<mrow>${inner}</mrow>`;
  }

  /** The letters of an argument, as they are. */
  letters() {
    this.skipSpace();
    if (this.token !== "{") return this.next() ?? "";
    let depth = 0;
    let text = "";
    for (; this.at < this.tokens.length; this.at += 1) {
      if (this.token === "{" && depth++ === 0) continue;
      if (this.token === "}" && --depth === 0) break;
      text += /^\\[^A-Za-z]$/.test(this.token) ? this.token.slice(1) : this.token;
    }
    this.at += 1;
    return text;
  }

  /** One atom; null: nothing is shown. */
  atom() {
    const token = this.next();
    if (token === undefined) return null;
    if (token === "{") return (this.at -= 1), this.group();
    if (/^\d/.test(token)) return html`<mn>${token}</mn>`;
    if (/^\p{L}$/u.test(token)) return html`<mi>${token}</mi>`;
    if (token === "~") return space(0.25);
    if (token === "-") return operator("−");
    if (token === "*") return operator("∗");
    if (!token.startsWith("\\")) return operator(token);
    return this.depth < MAX_DEPTH ? this.command(token.slice(1)) : html`<mtext>${token}</mtext>`;
  }

  command(name) {
    this.depth += 1;
    try {
      return this.symbol(name) ?? this.construct(name);
    } finally {
      this.depth -= 1;
    }
  }

  symbol(name) {
    if (Object.hasOwn(LETTERS, name)) return html`<mi mathvariant=${/^[A-Z]/.test(name) ? "normal" : undefined}>${LETTERS[name]}</mi>`;
    if (Object.hasOwn(OPERATORS, name)) return operator(OPERATORS[name]);
    if (Object.hasOwn(LARGE, name)) return html`<mo movablelimits="false">${LARGE[name]}</mo>`;
    if (Object.hasOwn(INTEGRALS, name)) return html`<mo>${INTEGRALS[name]}</mo>`;
    if (Object.hasOwn(LIMITS, name)) return html`<mi>${LIMITS[name]}</mi>`;
    if (FUNCTIONS.has(name)) return html`<mrow><mi>${name}</mi>${space(0.167)}</mrow>`;
    if (Object.hasOwn(FENCES, name)) return operator(FENCES[name]);
    return Object.hasOwn(SPACES, name) ? space(SPACES[name]) : null;
  }

  construct(name) {
    if (/^[cdt]?frac$/.test(name)) return html`<mfrac>${this.argument()}${this.argument()}</mfrac>`;
    if (/^[dt]?binom$/.test(name)) {
      const inner = html`<mfrac linethickness="0">${this.argument()}${this.argument()}</mfrac>`;
      return html`<mrow>${operator("(", true)}${inner}${operator(")", true)}</mrow>`;
    }
    if (name === "not") return this.negated();
    if (name === "sqrt") return this.root();
    if (name === "left") return this.fenced();
    if (name === "begin") return this.environment();
    if (name === "boxed") return html`<mrow class="boxed">${this.argument()}</mrow>`;
    if (name === "overset" || name === "stackrel") {
      const above = this.argument();
      return html`<mover>${this.argument()}${above}</mover>`;
    }
    if (name === "underset") {
      const below = this.argument();
      return html`<munder>${this.argument()}${below}</munder>`;
    }
    if (name === "pmod") return html`<mrow>${space(0.5)}${operator("(")}<mi>mod</mi>${space(0.25)}${this.argument()}${operator(")")}</mrow>`;
    if (name === "bmod" || name === "mod") return html`<mrow>${space(0.25)}<mi>mod</mi>${space(0.25)}</mrow>`;
    if (name === "tag" || name === "tag*") return html`<mrow>${space(2)}<mtext>(${this.letters()})</mtext></mrow>`;
    if (name === "label" || name === "color") return this.letters(), null;
    if (name === "phantom" || name === "hphantom") return html`<mphantom>${this.argument()}</mphantom>`;
    if (UPRIGHT.has(name)) return html`<mtext>${this.letters().replaceAll(" ", "\u00a0")}</mtext>`;
    if (Object.hasOwn(ACCENTS, name)) return html`<mover accent="true">${this.argument()}${operator(ACCENTS[name], true)}</mover>`;
    if (Object.hasOwn(UNDER, name)) return html`<munder>${this.argument()}${operator(UNDER[name], true)}</munder>`;
    const alphabet = ALIASES.get(name) ?? name;
    if (Object.hasOwn(ALPHABETS, alphabet)) return this.alphabet(alphabet);
    if (IGNORED.has(name)) return null;
    return /^[A-Za-z]/.test(name) ? html`<mtext class="unknown">\\${name}</mtext>` : operator(name);
  }

  alphabet(name) {
    const begin = this.at;
    const text = this.letters();
    if (/^[A-Za-z0-9]+$/.test(text)) return html`<mi mathvariant="normal">${inAlphabet(name, text)}</mi>`;
    this.at = begin;
    return this.argument();
  }

  negated() {
    const token = this.next() ?? "";
    const text = token.startsWith("\\") ? (own(OPERATORS, token.slice(1)) ?? token) : token;
    return operator(`${text}\u0338`.normalize());
  }

  root() {
    this.skipSpace();
    if (this.token !== "[") return html`<msqrt>${this.argument()}</msqrt>`;
    this.at += 1;
    const index = this.row("]");
    this.at += 1;
    return html`<mroot>${this.argument()}${index}</mroot>`;
  }

  fence() {
    const token = this.next() ?? ".";
    if (token === ".") return "";
    const name = token.slice(1);
    return token.startsWith("\\") ? (own(FENCES, name) ?? own(OPERATORS, name) ?? name) : token.replace("<", "⟨").replace(">", "⟩");
  }

  fenced() {
    const left = this.fence();
    const inner = this.row("\\right");
    this.at += 1;
    const right = this.at > this.tokens.length ? "" : this.fence();
    return html`<mrow>${left && operator(left, true)}${inner}${right && operator(right, true)}</mrow>`;
  }

  /** \begin{NAME} … \end{NAME}: rows of cells. */
  environment() {
    const name = this.letters().replace("*", "");
    const [left, right] = MATRICES.get(name) ?? ["", ""];
    if (name === "array" || name === "alignat") this.skipSpace(), this.token === "{" && this.letters();
    const rows = [[]];
    while (this.at < this.tokens.length) {
      rows.at(-1).push(this.row("&", "\\\\", "\\end", "\\cr"));
      const end = this.next();
      if (end === "\\\\" || end === "\\cr") rows.push([]);
      else if (end !== "&") break;
    }
    this.letters();
    if (rows.length > 1 && rows.at(-1).length <= 1 && isEmpty(rows.at(-1)[0])) rows.pop();
    const aligned = /^(align|split|alignat)/.test(name);
    const isLeft = name === "cases" || name === "array";
    const side = (index) => (aligned ? (index % 2 ? "left" : "right") : isLeft ? "left" : "center");
    const cells = (found) => found.map((cell, index) => html`<mtd class=${side(index)}>${cell}</mtd>`);
    const table = html`<mtable class=${aligned ? "aligned" : ""}>${rows.map((found) => html`<mtr>${cells(found)}</mtr>`)}</mtable>`;
    return html`<mrow>${left && operator(left, true)}${table}${right && operator(right, true)}</mrow>`;
  }
}

const isEmpty = (node) => !node || (node.type === "mrow" && [node.props.children].flat().filter(Boolean).length === 0);
