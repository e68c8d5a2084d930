/* Markdown's blocks (CommonMark 0.31 and GitHub's tables, as models write them): text → a list of blocks. Every line is looked at once on
   each level, and levels are bounded, so that no text takes long. */

const MAX_DEPTH = 8;
const MAX_COLUMNS = 32;
// No form has two parts beside each other that take the same letters: each takes time in the length of its line.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: (.*))?$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)| *$)/;
const DELIMITERS = /^\|? *:?-+:? *(?:\| *:?-+:? *)*\|?$/;
const MATHS = /^ {0,3}(\$\$|\\\[)/;
const TASK = /^\[([ xX])\] /;

const indentOf = (line) => line.length - line.trimStart().length;
const isBlank = (line) => line.trim() === "";

/** Whether a line ends a paragraph that it follows. A number interrupts one only where a list begins with 1. */
function interrupts(line) {
  const item = ITEM.exec(line);
  const begins = item !== null && item[3] !== undefined && (!/\d/.test(item[2]) || /^1[.)]/.test(item[2]));
  return begins || isBlank(line) || [FENCE, HEADING, RULE, QUOTE, MATHS].some((form) => form.test(line));
}

/** Blocks of a text: {kind, source, …}, where source is the text that the block was made of. */
export function blocks(text, depth = 0) {
  return new Reader(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), depth).read();
}

class Reader {
  constructor(lines, depth) {
    this.lines = lines;
    this.depth = depth;
    this.at = 0;
  }

  read() {
    const found = [];
    while (this.at < this.lines.length) {
      const begin = this.at;
      const block = isBlank(this.lines[begin]) ? null : this.block(this.lines[begin]);
      if (block === null) this.at = Math.max(this.at, begin + 1);
      else found.push({ ...block, source: this.lines.slice(begin, this.at).join("\n") });
    }
    return found;
  }

  block(line) {
    const fence = FENCE.exec(line);
    if (fence) return this.code(fence[1], fence[2].trim());
    const heading = HEADING.exec(line);
    if (heading) {
      this.at += 1;
      const words = (heading[2] ?? "").trim().split(" ");
      if (/^#+$/.test(words.at(-1))) words.pop();
      return { kind: "heading", level: heading[1].length, text: words.join(" ") };
    }
    if (RULE.test(line)) {
      this.at += 1;
      return { kind: "rule" };
    }
    const maths = MATHS.exec(line);
    if (maths) return this.maths(maths[1] === "$$" ? "$$" : "\\]", maths[0].length);
    if (this.depth < MAX_DEPTH && QUOTE.test(line)) return this.quote();
    if (this.depth < MAX_DEPTH && ITEM.test(line)) return this.list(ITEM.exec(line));
    if (line.includes("|") && DELIMITERS.test((this.lines[this.at + 1] ?? "").trim())) {
      const table = this.table();
      if (table) return table;
    }
    return this.paragraph();
  }

  code(mark, language) {
    const indent = indentOf(this.lines[this.at]);
    const found = [];
    let isOpen = true;
    for (this.at += 1; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      const end = /^ {0,3}(`{3,}|~{3,})[ \t]*$/.exec(line);
      if (end && end[1][0] === mark[0] && end[1].length >= mark.length) {
        this.at += 1;
        isOpen = false;
        break;
      }
      found.push(line.slice(Math.min(indent, indentOf(line))));
    }
    return { kind: "code", language: language.split(" ")[0], text: found.join("\n"), isOpen };
  }

  /** $$ … $$ or \[ … \], on one line or several; without its end it is a paragraph: the stream may bring it yet. */
  maths(end, skipped) {
    const found = [];
    for (let at = this.at; at < this.lines.length; at += 1) {
      const line = at === this.at ? this.lines[at].slice(skipped) : this.lines[at];
      if (isBlank(line) && at > this.at) break;
      const stop = line.indexOf(end);
      if (stop < 0) {
        found.push(line);
        continue;
      }
      const rest = line.slice(stop + end.length).trim();
      if (rest && !/^[.,;:]$/.test(rest)) break;
      this.at = at + 1;
      return { kind: "maths", text: [...found, line.slice(0, stop)].join("\n").trim() + rest };
    }
    return this.paragraph();
  }

  quote() {
    const found = [];
    for (; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      const isInside = QUOTE.test(line);
      if (!isInside && (!found.length || interrupts(line))) break;
      found.push(line.replace(QUOTE, ""));
    }
    return { kind: "quote", blocks: blocks(found.join("\n"), this.depth + 1) };
  }

  /** Items of one kind of marker. A line belongs to an item when it is two letters deeper than its marker: models indent by less than
      CommonMark asks for. */
  list(first) {
    const isOrdered = /\d/.test(first[2]);
    const marker = first[2].at(-1);
    const items = [];
    let isLoose = false;
    while (this.at < this.lines.length) {
      const item = ITEM.exec(this.lines[this.at]);
      if (!item || item[2].at(-1) !== marker || RULE.test(this.lines[this.at])) break;
      const { text, hadBlank } = this.item(item);
      isLoose ||= hadBlank;
      const task = TASK.exec(text);
      items.push({
        checked: task ? task[1] !== " " : null,
        blocks: blocks(task ? text.slice(task[0].length) : text, this.depth + 1),
      });
    }
    return { kind: "list", isOrdered, start: isOrdered ? Number.parseInt(first[2], 10) : 1, items, isLoose };
  }

  item(item) {
    const begin = item[1].length;
    const width = begin + item[2].length + (item[3]?.length ?? 1);
    const found = [this.lines[this.at].slice(width)];
    let hadBlank = false;
    for (this.at += 1; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      if (isBlank(line)) {
        const next = this.lines.slice(this.at, this.at + 4).find((other) => !isBlank(other)) ?? "";
        const goesOn = indentOf(next) >= begin + 2 && next !== "";
        if (!goesOn) {
          // Blank lines before a sibling belong to the list.
          if (ITEM.test(next)) {
            while (isBlank(this.lines[this.at])) this.at += 1;
          }
          break;
        }
        hadBlank = true;
        found.push("");
      } else if (indentOf(line) >= begin + 2) {
        found.push(line.slice(Math.min(width, indentOf(line))));
      } else if (interrupts(line) || ITEM.test(line) || isBlank(this.lines[this.at - 1])) {
        break;
      } else {
        found.push(line.trimStart());
      }
    }
    return { text: found.join("\n"), hadBlank };
  }

  table() {
    const head = cells(this.lines[this.at]);
    const aligns = cells(this.lines[this.at + 1]).map((cell) => {
      const right = cell.endsWith(":");
      return cell.startsWith(":") && right ? "center" : right ? "right" : "left";
    });
    if (head.length !== aligns.length || head.length > MAX_COLUMNS) return null;
    const rows = [];
    for (this.at += 2; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      if (!line.includes("|") || isBlank(line)) break;
      const row = cells(line);
      rows.push(head.map((_, index) => row[index] ?? ""));
    }
    return { kind: "table", head, aligns, rows };
  }

  paragraph() {
    const found = [this.lines[this.at]];
    for (this.at += 1; this.at < this.lines.length && !interrupts(this.lines[this.at]); this.at += 1) {
      found.push(this.lines[this.at]);
    }
    return { kind: "paragraph", text: found.map((line) => line.trimStart()).join("\n") };
  }
}

/** The cells of a table's line; a | behind a backslash or in a code span is none of its borders. */
function cells(line) {
  const found = [""];
  const text = line.trim().replace(/^\|/, "");
  let inCode = false;
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      found[found.length - 1] += "|";
      at += 1;
    } else if (text[at] === "|" && !inCode) {
      found.push("");
    } else {
      if (text[at] === "`") inCode = !inCode && text.includes("`", at + 1);
      found[found.length - 1] += text[at];
    }
  }
  if (found.length > 1 && isBlank(found.at(-1))) found.pop();
  return found.map((cell) => cell.trim());
}
