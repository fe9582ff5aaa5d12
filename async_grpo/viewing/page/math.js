"use strict";
/* LaTeX as MathML: a tree of [tag, attributes, ...children], which `grown` makes into elements.
 *
 * What models write is neither run nor trusted: a command that is not known is shown as its own
 * text, and a formula that cannot be read is shown as its source.
 */
const MAX_FORMULA = 20_000, MAX_DEPTH = 60;  // letters; braces in braces
const TOKEN = /\\[a-zA-Z]+\*?|\\[^]|[{}^_&~']|\s+|\d+(?:\.\d+)?|[^]/gu;
const table = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split("=")));

const LETTERS = table(`alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι
  kappa=κ lambda=λ mu=μ nu=ν xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ
  omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω ell=ℓ hbar=ℏ infty=∞ partial=∂
  nabla=∇ emptyset=∅ varnothing=∅ aleph=ℵ Re=ℜ Im=ℑ imath=ı jmath=ȷ angle=∠ triangle=△ square=□ degree=° dots=… ldots=… cdots=⋯
  vdots=⋮ ddots=⋱ prime=′ top=⊤ bot=⊥ blacksquare=■ checkmark=✓ pounds=£ S=§ P=¶ copyright=© %=% $=$ #=# &=& _=_`);
const OPERATORS = table(`times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗ odot=⊙ cap=∩ cup=∪
  wedge=∧ land=∧ vee=∨ lor=∨ lnot=¬ neg=¬ setminus=∖ le=≤ leq=≤ leqslant=⩽ ge=≥ geq=≥ geqslant=⩾ ne=≠ neq=≠ approx=≈ equiv=≡ sim=∼ simeq=≃
  cong=≅ propto=∝ ll=≪ gg=≫ in=∈ notin=∉ ni=∋ subset=⊂ subseteq=⊆ supset=⊃ supseteq=⊇ forall=∀ exists=∃ nexists=∄ mid=∣ nmid=∤ parallel=∥
  perp=⊥ to=→ rightarrow=→ leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐ Leftrightarrow=⇔ implies=⟹ impliedby=⟸ iff=⟺
  Longrightarrow=⟹ longrightarrow=⟶ mapsto=↦ uparrow=↑ downarrow=↓ hookrightarrow=↪ therefore=∴ because=∵ prec=≺ succ=≻ models=⊨
  vdash=⊢ colon=: dagger=† ddagger=‡ triangleq=≜ coloneqq=≔ lt=< gt=> backslash=\\ int=∫ iint=∬ iiint=∭ oint=∮ nless=≮ ngtr=≯ asymp=≍`);
const LARGE = table("sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ bigwedge=⋀ bigvee=⋁");
const LIMITS = new Set("lim max min sup inf limsup liminf argmax argmin gcd det Pr".split(" "));
const FUNCTIONS = new Set(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp deg dim ker hom arg mod`.split(/\s+/));
const FENCES = table(`(=( )=) [=[ ]=] |=| /=/ \\{={ \\}=} \\|=‖ \\lbrace={ \\rbrace=} \\langle=⟨ \\rangle=⟩ \\lfloor=⌊ \\rfloor=⌋ \\lceil=⌈
  \\rceil=⌉ \\lvert=| \\rvert=| \\vert=| \\lVert=‖ \\rVert=‖ \\Vert=‖ \\lbrack=[ \\rbrack=] <=⟨ >=⟩`);
const ACCENTS = table("hat=^ widehat=^ bar=¯ overline=¯ vec=→ overrightarrow=→ tilde=~ widetilde=~ dot=˙ ddot=¨ check=ˇ overbrace=⏞");
const UNDER = table("underline=_ underbrace=⏟");
const SPACES = { ",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.3em", "!": "0", quad: "1em", qquad: "2em", "\n": "0.3em", enspace: "0.5em", thinspace: "0.17em" };
const NOTHING = new Set("displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits hline nonumber notag centering left. bf rm it".split(" "));
const TEXTS = new Set("text textrm textbf textit texttt textsf mbox hbox mathrm operatorname operatorname* mathsf mathtt mathit textnormal".split(" "));
const STYLES = { mathbb: 0x1d538, mathbf: 0x1d400, boldsymbol: 0x1d400, bm: 0x1d400, mathcal: 0x1d49c, mathscr: 0x1d49c, mathfrak: 0x1d504 };
const SHAPED = {  // letters that Unicode had before, by the place where the alphabet lacks them
  0x1d538: { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }, 0x1d504: { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" },
  0x1d49c: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" },
};
const MATRICES = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", matrix: "", smallmatrix: "", array: "", cases: "{", dcases: "{", rcases: " }" };
const ALIGNED = /^(aligned|align|alignat|eqnarray|split|gather|gathered|equation|multline|flalign)\*?$/;

class Unreadable extends Error {}

/* The MathML of a formula; null: it cannot be read. */
function mathOf(source, isBlock) {
  if (source.length > MAX_FORMULA) return null;
  const reader = { tokens: source.match(TOKEN) ?? [], at: 0, depth: 0 };
  try {
    const rows = rowsOf(reader, []);
    const content = rows.length > 1 || rows[0].length > 1 ? [tableOf(rows, true)] : rows[0][0];
    return ["math", isBlock ? { display: "block" } : {}, ["mrow", {}, ...content]];
  } catch (error) {
    if (error instanceof Unreadable) return null;
    throw error;
  }
}

const peek = (reader) => reader.tokens[reader.at];

function take(reader, wanted) {
  const token = reader.tokens[reader.at++];
  if (token === undefined || (wanted !== undefined && token !== wanted)) throw new Unreadable(wanted);
  return token;
}

function skipSpaces(reader) {
  while (/^\s/.test(peek(reader) ?? "")) reader.at++;
}

/* Items up to one of `ends`, which is left. */
function itemsOf(reader, ends) {
  if (++reader.depth > MAX_DEPTH) throw new Unreadable();
  const items = [];
  for (;;) {
    skipSpaces(reader);
    const token = peek(reader);
    if (token === undefined || ends.includes(token)) break;
    const item = withScripts(reader);
    if (item) items.push(item);
  }
  reader.depth--;
  return items;
}

/* Rows of cells, up to one of `ends`. */
function rowsOf(reader, ends) {
  const rows = [[]];
  for (;;) {
    rows.at(-1).push(itemsOf(reader, ["&", "\\\\", ...ends]));
    const token = peek(reader);
    if (token === "&") reader.at++;
    else if (token === "\\\\") { reader.at++; skipOption(reader); rows.push([]); }
    else break;
  }
  if (rows.length > 1 && rows.at(-1).every((items) => !items.length)) rows.pop();
  return rows;
}

function skipOption(reader) {
  if (peek(reader) === "[") while (take(reader) !== "]");
}

function withScripts(reader) {
  let base = atomOf(reader), up = null, down = null;
  for (;;) {
    skipSpaces(reader);
    const token = peek(reader);
    if (token === "'") { reader.at++; up = rowOf([...(up ? [up] : []), ["mo", {}, "′"]]); }
    else if (token === "^" && !up?.isScript) { reader.at++; up = rowOf([...(up ? [up] : []), argumentOf(reader)]); }
    else if (token === "_" && !down) { reader.at++; down = argumentOf(reader); }
    else if (token === "\\limits" || token === "\\nolimits") reader.at++;
    else break;
  }
  if (!up && !down) return base;
  base ??= ["mrow", {}];
  const [both, above, below] = base.limits ? ["munderover", "mover", "munder"] : ["msubsup", "msup", "msub"];
  if (up && down) return [both, {}, base, down, up];
  return up ? [above, {}, base, up] : [below, {}, base, down];
}

const rowOf = (items) => (items.length === 1 ? items[0] : ["mrow", {}, ...items]);
const limited = (node) => Object.assign(node, { limits: true });
const fence = (text, stretchy) => ["mo", { stretchy: String(stretchy), fence: "true" }, text];

function argumentOf(reader) {
  skipSpaces(reader);
  const token = peek(reader);
  if (token === "}") throw new Unreadable();
  if (/^\d./.test(token ?? "")) {  // one digit, as in \frac12
    reader.tokens[reader.at] = token.slice(1);
    return ["mn", {}, token[0]];
  }
  return atomOf(reader) ?? ["mrow", {}];
}

function groupOfBraces(reader) {
  const items = itemsOf(reader, ["}"]);
  take(reader, "}");
  return rowOf(items);
}

/* The letters of a group in braces, as they are. */
function rawOf(reader) {
  skipSpaces(reader);
  if (peek(reader) !== "{") return take(reader);
  let text = "", open = 0;
  do {
    const token = take(reader);
    open += (token === "{") - (token === "}");
    if (token !== "{" && token !== "}") text += token.replace(/^\\([^a-zA-Z])/, "$1");
  } while (open);
  return text;
}

function atomOf(reader) {
  const token = take(reader);
  if (token === "{") return groupOfBraces(reader);
  if ("}^_&".includes(token)) {
    if (token !== "^" && token !== "_") throw new Unreadable(token);
    reader.at--;  // a script of nothing
    return ["mrow", {}];
  }
  if (token === "~") return ["mspace", { width: "0.3em" }];
  if (token.startsWith("\\")) return commandOf(reader, token.slice(1));
  if (/^\d/.test(token)) return ["mn", {}, token];
  if (/^\p{L}/u.test(token)) return ["mi", {}, token];
  if ("()[]|".includes(token)) return fence(token, false);
  return ["mo", {}, { "-": "−", "*": "∗" }[token] ?? token];
}

function commandOf(reader, name) {
  const own = (map) => (Object.hasOwn(map, name) ? map[name] : undefined);
  const symbol = own(LETTERS) ?? own(OPERATORS);
  if (symbol) return [own(LETTERS) ? "mi" : "mo", {}, symbol];
  if (own(LARGE)) return limited(["mo", { movablelimits: "true" }, LARGE[name]]);
  if (LIMITS.has(name)) return limited(["mo", { movablelimits: "true", rspace: "0.17em" }, name]);
  if (FUNCTIONS.has(name)) return ["mo", { rspace: "0.17em", lspace: "0.17em" }, name];
  if (Object.hasOwn(FENCES, `\\${name}`)) return fence(FENCES[`\\${name}`], false);
  if (own(SPACES)) return ["mspace", { width: SPACES[name] }];
  if (TEXTS.has(name)) return ["mtext", {}, rawOf(reader)];
  if (own(STYLES)) return ["mi", {}, shapedAs(STYLES[name], rawOf(reader))];
  if (own(ACCENTS)) return ["mover", { accent: "true" }, argumentOf(reader), ["mo", { stretchy: String(name.length > 5) }, ACCENTS[name]]];
  if (own(UNDER)) return limited(["munder", {}, argumentOf(reader), ["mo", { stretchy: "true" }, UNDER[name]]]);
  if (/^[Bb]ig+[lrm]?$/.test(name)) return fence(delimiterOf(reader), false);
  if (NOTHING.has(name)) return null;
  return Object.hasOwn(BUILT, name) ? BUILT[name](reader) : ["mtext", { class: "unknown" }, `\\${name}`];
}

const ofTwo = (build) => (reader) => build(argumentOf(reader), argumentOf(reader));
const fraction = ofTwo((above, below) => ["mfrac", {}, above, below]);
const binomial = ofTwo((above, below) => ["mrow", {}, fence("(", true), ["mfrac", { linethickness: "0" }, above, below], fence(")", true)]);
const boxed = (reader) => ["mrow", { class: "boxed" }, argumentOf(reader)];
const dropped = (reader) => { rawOf(reader); return null; };
const BUILT = {
  frac: fraction, dfrac: fraction, tfrac: fraction, cfrac: fraction, binom: binomial, dbinom: binomial, tbinom: binomial,
  boxed, fbox: boxed, sqrt: rootOf, left: fencedOf, begin: environmentOf,
  overset: ofTwo((above, base) => ["mover", {}, base, above]), stackrel: ofTwo((above, base) => ["mover", {}, base, above]),
  underset: ofTwo((below, base) => ["munder", {}, base, below]),
  xrightarrow: (reader) => { skipOption(reader); return ["mover", {}, ["mo", { stretchy: "true" }, "→"], argumentOf(reader)]; },
  not: (reader) => { const [tag, attributes, text] = argumentOf(reader); return [tag, attributes, `${text}\u0338`]; },
  pmod: (reader) => ["mrow", {}, ["mspace", { width: "0.5em" }], fence("(", false), ["mo", { rspace: "0.3em" }, "mod"], argumentOf(reader), fence(")", false)],
  bmod: () => ["mo", { lspace: "0.3em", rspace: "0.3em" }, "mod"],
  color: dropped, hspace: dropped, vspace: dropped, label: dropped,
  textcolor: (reader) => { rawOf(reader); return argumentOf(reader); }, tag: (reader) => ["mtext", {}, `  (${rawOf(reader)})`],
  middle: (reader) => fence(delimiterOf(reader), true), cancel: (reader) => ["mrow", { class: "cancelled" }, argumentOf(reader)],
};

function delimiterOf(reader) {
  skipSpaces(reader);
  const token = take(reader);
  if (token === ".") return "";
  if (!Object.hasOwn(FENCES, token)) throw new Unreadable(token);
  return FENCES[token];
}

function fencedOf(reader) {
  const start = delimiterOf(reader), items = itemsOf(reader, ["\\right"]);
  take(reader, "\\right");
  return ["mrow", {}, fence(start, true), ...items, fence(delimiterOf(reader), true)];
}

function rootOf(reader) {
  skipSpaces(reader);
  if (peek(reader) !== "[") return ["msqrt", {}, argumentOf(reader)];
  reader.at++;
  const degree = rowOf(itemsOf(reader, ["]"]));
  take(reader, "]");
  return ["mroot", {}, argumentOf(reader), degree];
}

function environmentOf(reader) {
  const name = rawOf(reader), isAligned = ALIGNED.test(name);
  if (!isAligned && !Object.hasOwn(MATRICES, name)) throw new Unreadable(name);
  if (["array", "alignat", "alignat*"].includes(name)) rawOf(reader);  // the columns' places
  const rows = rowsOf(reader, ["\\end"]), [start, end] = MATRICES[name] ?? "";
  take(reader, "\\end");
  if (rawOf(reader) !== name) throw new Unreadable(name);
  const isLeft = name.endsWith("cases");
  return ["mrow", {}, ...(start?.trim() ? [fence(start, true)] : []), tableOf(rows, isAligned, isLeft), ...(end ? [fence(end, true)] : [])];
}

/* Cells of aligned formulas meet at their `&`. */
function tableOf(rows, isAligned, isLeft = false) {
  const place = (k, size) => (isLeft ? "left" : isAligned && size > 1 ? (k % 2 ? "left" : "right") : "");
  const size = rows.reduce((most, row) => Math.max(most, row.length), 0);
  return ["mtable", isAligned ? { class: "aligned", displaystyle: "true" } : {}, ...rows.map((row) =>
    ["mtr", {}, ...row.map((items, k) => ["mtd", { class: place(k, size) }, ...items])])];
}

function shapedAs(start, text) {
  return text.replace(/[a-zA-Z]/g, (letter) => SHAPED[start]?.[letter]
    ?? String.fromCodePoint(start + letter.charCodeAt(0) - (letter < "a" ? 65 : 97 - 26)));
}

if (typeof module !== "undefined") module.exports = { mathOf };
