/* Markdown within a line: text → a list of strings and nodes {kind, children | text, …}. One pass; what could be searched for again and again is
   searched for once, and nesting is bounded. */

const MAX_OPEN = 16; // delimiters and brackets that may wait for their end: nesting is at most three times that
const MAX_RUN = 3; // of * and _: longer ones are text
const MAX_LINK = 2048;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const BARE_LINK = /https?:\/\/[^\s<>"'`]+/y;
const ANGLE_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const BREAK_TAG = /<br ?\/?>/y;

/** The address of a link when it may be followed: http, https and mailto, without control and bidi characters; else null. */
export function safeLink(address) {
  // eslint-disable-next-line no-control-regex
  if (/[\u0000-\u0020\u007f-\u009f\u202a-\u202e\u2066-\u2069]/.test(address) || !/^(https?:\/\/|mailto:)/i.test(address)) return null;
  try {
    return new URL(address).href;
  } catch {
    return null;
  }
}

/** Nodes of a paragraph's text. */
export function inline(text) {
  return new Scanner(text).scan();
}

class Scanner {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.parts = [];
    this.brackets = []; // indexes of parts that a ] may close
    this.missing = new Set(); // ends that do not come any more
  }

  scan() {
    let begin = 0;
    while (this.at < this.text.length) {
      const here = this.at;
      const found = this.special(this.text[here]);
      if (found === null) {
        this.at = here + 1;
        continue;
      }
      if (here > begin) this.parts.push(this.text.slice(begin, here));
      this.flush(found);
      begin = this.at;
    }
    if (begin < this.text.length) this.parts.push(this.text.slice(begin));
    return emphasised(this.parts);
  }

  flush(found) {
    if (found.kind !== "close") {
      if (found.kind === "bracket") {
        this.brackets.push(this.parts.length);
        if (this.brackets.length > MAX_OPEN) this.brackets.shift();
      }
      this.parts.push(found);
      return;
    }
    const begin = this.brackets.pop();
    const opened = this.parts[begin];
    const children = emphasised(this.parts.splice(begin).slice(1));
    this.parts.push({ kind: "link", children, address: found.address, isImage: opened.isImage });
    if (!opened.isImage) this.brackets = []; // a link holds no link
  }

  /** What begins here, with `at` behind it; null: plain text. */
  special(letter) {
    switch (letter) {
      case "\\":
        return this.escape();
      case "`":
        return this.code();
      case "$":
        return this.maths();
      case "*":
      case "_":
      case "~":
        return this.delimiter(letter);
      case "!":
        return this.text[this.at + 1] === "[" ? this.skip(2, { kind: "bracket", text: "![", isImage: true }) : null;
      case "[":
        return this.skip(1, { kind: "bracket", text: "[", isImage: false });
      case "]":
        return this.close();
      case "<":
        return this.match(ANGLE_LINK, (found) => link(found[1])) ?? this.match(BREAK_TAG, () => ({ kind: "break" }));
      case "h":
        return this.bare();
      case "\n":
        return this.skip(1, /( {2}|\\)$/.test(this.text.slice(Math.max(0, this.at - 2), this.at)) ? { kind: "break" } : "\n");
      default:
        return null;
    }
  }

  skip(length, found) {
    this.at += length;
    return found;
  }

  match(form, make) {
    form.lastIndex = this.at;
    const found = form.exec(this.text);
    return found ? this.skip(found[0].length, make(found)) : null;
  }

  /** Where `end` stands from `from` on, or -1; an end that is missing is looked for once. */
  find(end, from) {
    if (this.missing.has(end)) return -1;
    const found = this.text.indexOf(end, from);
    if (found < 0) this.missing.add(end);
    return found;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "(" || next === "[") {
      const end = this.find(next === "(" ? "\\)" : "\\]", this.at + 2);
      if (end > 0) return this.skip(end + 2 - this.at, maths(this.text.slice(this.at + 2, end), next === "["));
    }
    if (next === "\n") return this.skip(2, { kind: "break" });
    return next && PUNCTUATION.test(next) ? this.skip(2, next) : null;
  }

  run(letter) {
    let end = this.at;
    while (this.text[end] === letter) end += 1;
    return end - this.at;
  }

  code() {
    const length = this.run("`");
    const mark = "`".repeat(length);
    if (length > 64) return this.skip(length, mark);
    let end = this.find(mark, this.at + length);
    while (end > 0 && this.text[end + length] === "`") {
      while (this.text[end + length] === "`") end += 1; // a longer run is no end
      end = this.find(mark, end + length);
    }
    if (end < 0) {
      this.missing.add(mark);
      return this.skip(length, mark);
    }
    let text = this.text.slice(this.at + length, end).replaceAll("\n", " ");
    if (text.startsWith(" ") && text.endsWith(" ") && text.trim()) text = text.slice(1, -1);
    return this.skip(end + length - this.at, { kind: "code", text });
  }

  /** $…$ and $$…$$. A price is none: its $ is followed by a space, or its end by a digit. */
  maths() {
    const mark = this.text[this.at + 1] === "$" ? "$$" : "$";
    const begin = this.at + mark.length;
    if (mark === "$" && /\s/.test(this.text[begin] ?? " ")) return null;
    const end = this.find(mark, begin);
    const isMaths =
      end > begin && (mark === "$$" || (!/\s/.test(this.text[end - 1]) && !/\d/.test(this.text[end + 1] ?? "")));
    if (!isMaths || this.text.slice(begin, end).includes("\n\n")) return null;
    return this.skip(end + mark.length - this.at, maths(this.text.slice(begin, end), mark === "$$"));
  }

  delimiter(letter) {
    const count = this.run(letter);
    if (count > MAX_RUN || (letter === "~" && count !== 2)) return this.skip(count, letter.repeat(count));
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + count] ?? " ";
    const isFree = (one, other) =>
      !/\s/.test(one) && (!PUNCTUATION.test(one) || /\s/.test(other) || PUNCTUATION.test(other));
    let opens = isFree(after, before);
    let closes = isFree(before, after);
    if (letter === "_") {
      [opens, closes] = [opens && (!closes || PUNCTUATION.test(before)), closes && (!opens || PUNCTUATION.test(after))];
    }
    return this.skip(count, { kind: "delimiter", letter, count, opens, closes });
  }

  /** ](address) or ](address "title"), where a bracket is open. */
  close() {
    if (!this.brackets.length || this.text[this.at + 1] !== "(") {
      this.brackets.pop();
      return null;
    }
    const form = /\]\([ \n]*(<[^<>\n]*>|[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)(?:[ \n]+(?:"[^"]*"|'[^']*'))?[ \n]*\)/y;
    const found = this.match(form, (parts) => ({ kind: "close", address: parts[1].replace(/^<|>$/g, "") }));
    if (found === null) this.brackets.pop();
    return found;
  }

  bare() {
    if (/[\p{L}\p{N}]/u.test(this.text[this.at - 1] ?? " ")) return null;
    return this.match(BARE_LINK, (found) => {
      // Punctuation at the end belongs to the sentence, and so does a bracket that the address did not open.
      let address = found[0].slice(0, MAX_LINK).replace(/[.,;:!?*_~]+$/, "");
      const extra = address.split(")").length - address.split("(").length;
      const ends = /\)*$/.exec(address)[0].length;
      address = address.slice(0, address.length - Math.min(Math.max(extra, 0), ends));
      this.at -= found[0].length - address.length;
      return link(address);
    });
  }
}

const maths = (text, isDisplay) => ({ kind: "maths", text, isDisplay });
const link = (address) => ({ kind: "link", children: [address.replace(/^mailto:/, "")], address, isImage: false });

/** Parts with emphasis: delimiters in pairs become nodes, others text. After CommonMark's appendix, with a bounded stack. */
function emphasised(parts) {
  const out = [];
  const openers = []; // indexes in `out` of delimiters that may open
  for (const part of parts) {
    if (part.kind !== "delimiter") {
      out.push(part);
      continue;
    }
    const closer = { ...part };
    while (closer.count && closer.closes) {
      const at = openers.findLastIndex((index) => out[index].letter === closer.letter && isPair(out[index], closer));
      if (at < 0) break;
      const opener = out[openers[at]];
      const used = Math.min(2, opener.count, closer.count);
      const children = asText(out.splice(openers[at] + 1));
      const kind = closer.letter === "~" ? "deleted" : used === 2 ? "strong" : "emphasis";
      openers.length = at + 1;
      opener.count -= used;
      closer.count -= used;
      if (!opener.count) {
        out.pop();
        openers.pop();
      }
      out.push({ kind, children });
    }
    if (!closer.count) continue;
    if (closer.opens) {
      openers.push(out.length);
      if (openers.length > MAX_OPEN) openers.shift();
    }
    out.push(closer);
  }
  return asText(out);
}

/** CommonMark's rule of three: of two delimiters that can open and close, the sum of the lengths is no multiple of three. */
function isPair(opener, closer) {
  const either = opener.closes || closer.opens;
  return !(either && (opener.count + closer.count) % 3 === 0 && (opener.count % 3 || closer.count % 3));
}

function asText(parts) {
  return parts.map((part) => {
    if (part.kind === "delimiter") return part.letter.repeat(part.count);
    return part.kind === "bracket" ? part.text : part;
  });
}
