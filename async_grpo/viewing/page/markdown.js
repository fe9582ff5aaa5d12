"use strict";
/* Markdown as a tree of [tag, attributes, ...children], with formulas by math.js.
 *
 * No text of a model becomes markup: `grown` makes elements of the tags below and of no others, and
 * attributes hold values of this file and math.js alone. Addresses and HTML stay the text they are.
 */
const MAX_INLINE = 50_000, MAX_REACH = 4_000, MAX_NESTED = 8;  // letters, letters to a closing mark, levels
const TAGS = new Set("p h4 h5 h6 ul ol li pre code blockquote table tbody tr th td strong em del br hr span div".split(" "));
const MATH_TAGS = new Set("math mrow mi mn mo mtext mspace msup msub msubsup mover munder munderover mfrac msqrt mroot mtable mtr mtd".split(" "));
const ATTRIBUTES = new Set("class display displaystyle stretchy fence movablelimits linethickness lspace rspace width accent start".split(" "));
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/, HEADING = /^ {0,3}(#{1,6})\s+(.*)$/, RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}>\s?/, ITEM = /^(\s*)([-*+]|(\d{1,9})[.)])\s+(?=\S)/, DIVIDER = /^\s*\|?\s*:?-{1,}:?\s*(\|\s*:?-{1,}:?\s*)*\|?\s*$/;
const DISPLAY = /^\s*(\$\$|\\\[|\\begin\{((?:align|aligned|equation|gather|eqnarray|multline|alignat)\*?)\})/;

function markdownOf(text) {
  return blocksOf(text.split(/\r?\n/), 0);
}

function blocksOf(lines, depth) {
  const found = [];
  let at = 0, paragraph = [];
  const flush = () => { if (paragraph.length) found.push(["p", {}, ...inline(paragraph.join("\n"), 0)]); paragraph = []; };
  while (at < lines.length) {
    const line = lines[at], block = line.trim() === "" ? [null, at + 1] : blockAt(lines, at, depth, paragraph.length > 0);
    if (block) flush();
    if (block?.[0]) found.push(block[0]);
    if (!block) paragraph.push(line);
    at = block ? block[1] : at + 1;
  }
  flush();
  return found;
}

/* [the block that begins at this line, the line after it]; null: a paragraph goes on. */
function blockAt(lines, at, depth, isWithin) {
  const line = lines[at], mark = line.match(FENCE), heading = line.match(HEADING);
  if (mark) return codeAt(lines, at, mark);
  if (DISPLAY.test(line)) return formulaAt(lines, at);
  if (heading) return [[`h${Math.min(heading[1].length + 3, 6)}`, {}, ...inline(heading[2].replace(/\s#+\s*$/, ""), 0)], at + 1];
  if (RULE.test(line)) return [["hr", {}], at + 1];
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-") && lines[at + 1].includes("|")) return tableAt(lines, at);
  if (depth >= MAX_NESTED) return null;
  if (QUOTE.test(line)) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end++;
    return [["blockquote", {}, ...blocksOf(lines.slice(at, end).map((each) => each.replace(QUOTE, "")), depth + 1)], end];
  }
  const item = line.match(ITEM);
  return item && !(isWithin && item[3] && item[3] !== "1") ? listAt(lines, at, depth, item) : null;
}

function codeAt(lines, at, [, mark, language]) {
  let end = at + 1;
  const isEnd = (line) => line.trim().length >= mark.length && line.trim().split("").every((letter) => letter === mark[0]);
  while (end < lines.length && !isEnd(lines[end])) end++;
  const label = language.trim() ? [["span", { class: "language" }, language.trim()]] : [];
  return [["pre", {}, ...label, ["code", {}, lines.slice(at + 1, end).join("\n")]], end + 1];
}

/* A formula of its own lines; null: nothing ends it. */
function formulaAt(lines, at) {
  const [whole, mark, name] = lines[at].match(DISPLAY), closing = { $$: "$$", "\\[": "\\]" }[mark] ?? `\\end{${name}}`;
  let text = lines[at].slice(whole.length), end = at;
  while (!text.includes(closing)) {
    if (++end >= lines.length || text.length > MAX_REACH || lines[end].trim() === "") return null;
    text += `\n${lines[end]}`;
  }
  const [source, rest] = [text.slice(0, text.indexOf(closing)), text.slice(text.indexOf(closing) + closing.length)];
  const shown = formula(name ? `${mark}${source}${closing}` : source, true, `${mark}${source}${closing}`);
  return [rest.trim() ? ["div", {}, shown, ...inline(rest, 0)] : shown, end + 1];
}

function tableAt(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((each) => each.trim());
  const places = cells(lines[at + 1]).map((each) => (each.endsWith(":") ? (each.startsWith(":") ? "centre" : "right") : ""));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const row = (line, tag) => ["tr", {}, ...cells(line).map((each, k) => [tag, { class: places[k] ?? "" }, ...inline(each, 0)])];
  return [["table", {}, ["tbody", {}, row(lines[at], "th"), ...lines.slice(at + 2, end).map((line) => row(line, "td"))]], end];
}

/* An item holds the lines that are indented below it. */
function listAt(lines, at, depth, first) {
  const isOrdered = Boolean(first[3]), items = [], indent = first[1].length;
  while (at < lines.length) {
    const item = lines[at].match(ITEM);
    if (!item || Boolean(item[3]) !== isOrdered || item[1].length < indent || item[1].length > indent + 3) break;
    const content = [lines[at].slice(item[0].length)], least = item[1].length + 2;
    const isInside = (line) => line.length - line.trimStart().length >= least;
    at++;
    while (at < lines.length && (isInside(lines[at]) ? lines[at].trim() : !lines[at].trim() && isInside(lines[at + 1] ?? ""))) {
      content.push(lines[at].slice(Math.min(item[0].length, lines[at].length - lines[at].trimStart().length)));
      at++;
    }
    items.push(["li", {}, ...tight(blocksOf(content, depth + 1))]);
    if (!lines[at]?.trim() && lines[at + 1]?.match(ITEM)) at++;  // a blank line between items
  }
  return [[isOrdered ? "ol" : "ul", isOrdered ? { start: String(Number(first[3])) } : {}, ...items], at];
}

const tight = ([first, ...rest]) => (first?.[0] === "p" ? [...first.slice(2), ...rest] : first ? [first, ...rest] : []);

// --- within a paragraph

const MARKS = [
  { open: "$$", close: "$$", show: (text) => formula(text, true, `$$${text}$$`) },
  { open: "\\[", close: "\\]", show: (text) => formula(text, true, `\\[${text}\\]`) },
  { open: "\\(", close: "\\)", show: (text) => formula(text, false, `\\(${text}\\)`) },
  { open: "***", close: "***", isTight: true, show: (text, depth) => ["strong", {}, ["em", {}, ...inline(text, depth + 1)]] },
  { open: "**", close: "**", isTight: true, show: (text, depth) => ["strong", {}, ...inline(text, depth + 1)] },
  { open: "__", close: "__", isTight: true, isWord: true, show: (text, depth) => ["strong", {}, ...inline(text, depth + 1)] },
  { open: "~~", close: "~~", isTight: true, show: (text, depth) => ["del", {}, ...inline(text, depth + 1)] },
  { open: "$", close: "$", isTight: true, isMoney: true, show: (text) => formula(text, false, `$${text}$`) },
  { open: "*", close: "*", isTight: true, show: (text, depth) => ["em", {}, ...inline(text, depth + 1)] },
  { open: "_", close: "_", isTight: true, isWord: true, show: (text, depth) => ["em", {}, ...inline(text, depth + 1)] },
];

function inline(text, depth) {
  if (depth > MAX_NESTED || text.length > MAX_INLINE) return [text];
  const found = [], searched = {};  // {mark: up to where nothing closes it}
  let start = 0, at = 0;
  const add = (node, end) => { if (at > start) found.push(...broken(text.slice(start, at))); found.push(node); start = at = end; };
  while (at < text.length) {
    const next = text.slice(at).search(/[`$*_~\\]/);
    if (next < 0) break;
    at += next;
    const seen = spanAt(text, at, depth, searched);
    if (seen) add(...seen); else at += text[at] === "\\" ? 2 : text.slice(at).match(/^([`$*_~])\1*/)[0].length;
  }
  at = text.length;
  if (at > start) found.push(...broken(text.slice(start)));
  return found;
}

/* [what begins at this place, where it ends]; null: the letter stands for itself. */
function spanAt(text, at, depth, searched) {
  if (text[at] === "`") {
    const mark = text.slice(at).match(/^`+/)[0], end = near(text, mark, at + mark.length);
    return end > 0 ? [["code", {}, text.slice(at + mark.length, end)], end + mark.length] : null;
  }
  if (text.startsWith("\\boxed{", at)) {
    const end = closingBrace(text, at + 7);
    return end > 0 ? [formula(text.slice(at, end), false, text.slice(at, end)), end] : null;
  }
  const environment = text.slice(at, at + 30).match(/^\\begin\{([a-zA-Z]+\*?)\}/);
  if (environment) {
    const closing = `\\end{${environment[1]}}`, end = near(text, closing, at) + closing.length, source = text.slice(at, end);
    if (end > at) return [formula(source, true, source), end];
  }
  for (const mark of MARKS) {
    if (!text.startsWith(mark.open, at)) continue;
    const from = at + mark.open.length, end = endOf(mark, text, from, searched);
    if (end > from && !(mark.isWord && /[\p{L}\p{N}]/u.test(text[at - 1] ?? ""))) return [mark.show(text.slice(from, end), depth), end + mark.close.length];
  }
  return /^\\[!-/:-@[-`{-~]/.test(text.slice(at, at + 2)) && !"()[]{}|,;:!\\".includes(text[at + 1]) ? [text[at + 1], at + 2] : null;
}

function endOf(mark, text, from, searched) {
  if (mark.isTight && /\s/.test(text[from] ?? " ")) return -1;
  let end = near(text, mark.close, Math.max(from, searched[mark.open] ?? 0), from);
  for (; end > 0; end = near(text, mark.close, end + 1, from)) {
    const before = text[end - 1], after = text[end + mark.close.length] ?? "";
    if (mark.isTight && /\s/.test(before)) continue;
    if (mark.isMoney && (before === "\\" || /\d/.test(after))) continue;
    if (mark.isWord && /[\p{L}\p{N}]/u.test(after)) continue;
    if (mark.close.length === 1 && "*_".includes(mark.close) && (after === mark.close || before === mark.close)) continue;
    return end;
  }
  searched[mark.open] = Math.max(from + MAX_REACH, searched[mark.open] ?? 0);
  return -1;
}

/* Where `wanted` stands next, if that is not too far: marks that nothing closes cost little. */
function near(text, wanted, from, start = from) {
  const found = text.slice(from, start + MAX_REACH).indexOf(wanted);
  return found < 0 ? -1 : from + found;
}

function closingBrace(text, from) {
  for (let at = from, open = 1; at < Math.min(text.length, from + MAX_REACH); at++) {
    open += (text[at] === "{") - (text[at] === "}");
    if (!open) return at + 1;
  }
  return -1;
}

/* Models end lines where they mean to. */
const broken = (text) => text.split("\n").flatMap((line, n) => (n ? [["br", {}], line] : [line])).filter((each) => each !== "");

function formula(source, isBlock, shown) {
  return mathOf(source, isBlock) ?? ["code", { class: "formula" }, shown];
}

// --- elements

/* The only place where a tree becomes elements. */
function grown(tree) {
  if (typeof tree === "string") return tree;
  const [tag, attributes, ...children] = tree, isMath = MATH_TAGS.has(tag);
  if (!isMath && !TAGS.has(tag)) throw new Error(`no element ${tag} is made of a text`);
  const kept = Object.fromEntries(Object.entries(attributes).filter(([name, value]) => ATTRIBUTES.has(name) && value !== ""));
  return make(tag, { ...kept, math: isMath }, ...children.map(grown));
}

if (typeof module !== "undefined") {
  globalThis.mathOf = require("./math.js").mathOf;
  module.exports = { markdownOf };
}
