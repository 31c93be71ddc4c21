// Keeps the page current: updates the parts marked data-live, appends to the log, and shows times in
// the browser's time zone.
"use strict";

const PART_MS = 3000; // between two updates of the page
const LOG_MS = 1000; // between two updates of the log
const IDLE_MS = 120000; // without input after which updates are rarer
const IDLE_PART_MS = 60000; // between two updates of the page of an idle reader
const IDLE_LOG_MS = 15000;
const PATIENCE_MS = 30000; // after which a request counts as failed
const MOST_CHARACTERS = 1e6; // of the log; older ones are dropped
const MOST_NODES = 5e4; // of the log: texts of one color, or of one update
const END_PX = 8; // the log is at its end if less of it is hidden below
const LONGEST_ESCAPE = 200; // characters; a longer sequence is shown as text
const MOST_STYLES = 20; // sequences before a carriage return that are kept
const DEEPEST = 16; // lines above the cursor that a program can redraw

const silence = document.getElementById("silence");
const content = document.getElementById("content");

function tell(text) {
  if (silence.textContent !== text) silence.textContent = text;
  silence.hidden = text === "";
}

function ask(target) {
  return fetch(target, { redirect: "manual", signal: AbortSignal.timeout(PATIENCE_MS) });
}

function showLocalTimes(part) {
  for (const each of part.querySelectorAll("time")) {
    const local = new Date(each.dateTime).toLocaleString();
    if (each.hasAttribute("data-local")) each.textContent = local;
    else each.title = local;
  }
  for (const each of part.querySelectorAll("[data-moment]")) {
    const [one, two] = each.parentNode.querySelectorAll("[data-moment]");
    const isClose = two !== undefined && Date.parse(two.dataset.moment) - Date.parse(one.dataset.moment) < 60000;
    const shape = { hour: "2-digit", minute: "2-digit", ...(isClose ? { second: "2-digit" } : {}) };
    each.textContent = new Date(each.dataset.moment).toLocaleTimeString([], shape);
  }
}

const APART_PX = 6; // between two labels of an axis

// Hides the labels of an axis that lie over the next one; the last one of an axis stays.
function thinMarks() {
  const axes = [...document.querySelectorAll(".plot > svg[role='img']")].map((each) => [...each.querySelectorAll(":scope > .mark")]);
  const boxes = axes.map((marks) => marks.map((each) => each.getBoundingClientRect())); // one layout for all
  for (const [number, marks] of axes.entries()) {
    let free = Infinity;
    for (const at of [...marks.keys()].reverse()) {
      const box = boxes[number][at];
      const isCrowded = box.right + APART_PX > free;
      marks[at].classList.toggle("crowded", isCrowded);
      if (!isCrowded && box.width > 0) free = box.left;
    }
  }
}

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset.key || "" : "";
}

// What the reader changes: it stays as it is.
const OWN = { DETAILS: ["open"], INPUT: ["checked", "value"], OPTION: ["selected"] };

function updateAttributes(old, fresh) {
  const own = OWN[old.tagName] ?? [];
  for (const { name } of [...old.attributes]) {
    if (!own.includes(name) && !fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (!own.includes(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

// Text that the reader has selected stays until the selection ends.
function isSelected(node) {
  const selection = document.getSelection();
  return selection !== null && !selection.isCollapsed && selection.containsNode(node, true);
}

// Changes only what differs, so that focus, selection, scroll positions and open details stay.
// Elements with a key, such as rows of tables, are found again wherever they are.
function updateNodes(old, fresh) {
  const keyed = new Map([...old.childNodes].map((each) => [keyOf(each), each]));
  const kept = new Set([...fresh.childNodes].map(keyOf));
  let at = old.firstChild;
  for (const next of [...fresh.childNodes]) {
    const key = keyOf(next);
    while (at !== null && keyOf(at) && !kept.has(keyOf(at))) {
      const gone = at;
      at = at.nextSibling;
      gone.remove();
    }
    let found = at !== null && !keyOf(at) ? at : null;
    if (key) found = keyed.get(key) ?? null;
    if (key) keyed.delete(key);
    if (found === null || found.nodeName !== next.nodeName) {
      old.insertBefore(next, at);
      continue;
    }
    if (found === at) at = at.nextSibling;
    else old.insertBefore(found, at);
    if (found.nodeType !== Node.ELEMENT_NODE) {
      if (found.data !== next.data && !isSelected(found)) found.data = next.data;
      continue;
    }
    updateAttributes(found, next);
    updateNodes(found, next);
  }
  while (at !== null) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

function updatePart(old, fresh) {
  const focused = document.activeElement;
  const held = old !== focused && old.contains(focused);
  showLocalTimes(fresh);
  updateNodes(old, fresh);
  if (!held || document.activeElement === focused) return;
  const target = focused.isConnected ? focused : old;
  if (target === old) old.tabIndex = -1; // what had the focus is gone: the reader stays near it
  target.focus({ preventScroll: true });
}

// Whether a part has begun to exist, such as curves: a browser runs its scripts only in a page that it
// loads. Each is told once, so that one that the whole page leaves out loads no page again and again.
function hasNewPart(page) {
  const [here, there] = [document, page].map((each) => [...each.querySelectorAll("[data-part]")].map((part) => part.dataset.part));
  const fresh = there.filter((each) => !here.includes(each)).map((each) => `part ${each} of ${location.pathname}`);
  const untold = fresh.filter((each) => sessionStorage.getItem(each) === null);
  for (const each of untold) sessionStorage.setItem(each, "told");
  return untold.length > 0;
}

async function updateParts() {
  const answer = await ask(location.pathname + location.search);
  if (answer.type === "opaqueredirect") return location.reload(); // to sign in again
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (!answer.ok) {
    const notice = page.querySelector("main .notice");
    return tell(`This page is not current. ${notice ? notice.textContent : answer.statusText}`);
  }
  tell("");
  document.title = page.title;
  for (const old of document.querySelectorAll("[data-live]")) {
    const fresh = page.getElementById(old.id);
    if (fresh !== null) updatePart(old, fresh);
  }
  thinMarks();
  if (hasNewPart(page) && document.getSelection().isCollapsed) return location.reload();
  const [hadNoLog, hasNoLog] = [document, page].map((each) => each.getElementById("no-log") !== null);
  if (hadNoLog && !hasNoLog) return location.reload(); // the job was queued again: a log will follow
  const attempt = Number(page.getElementById("head")?.dataset.attempt ?? 0);
  if (view !== null && attempt > view.attempt) view.over = false; // it runs again
}

let touched = performance.now(); // the time of the last input
for (const each of ["pointermove", "pointerdown", "keydown", "wheel", "scroll", "focus"]) {
  addEventListener(each, () => (touched = performance.now()), { passive: true, capture: true });
}

async function repeat(act, pause, idlePause) {
  let last = -Infinity;
  for (;;) {
    await new Promise((done) => setTimeout(done, pause));
    const now = performance.now();
    if (document.hidden || (now - touched > IDLE_MS && now - last < idlePause)) continue;
    last = now;
    try {
      await act();
    } catch {
      tell("No answer from the console. This page is not current; retrying.");
    }
  }
}

// The classes of the colors of terminals; the bright ones look the same.
const COLORS = ["", "bad", "good", "warn", "busy", "calm", "busy", ""];
const STYLE = /(\x1b\[[0-9;:]*m)/;

// Returns the classes after a sequence that changes the style of text.
function styleAfter(style, sequence) {
  let [color, bold] = [style.color, style.bold];
  for (const code of sequence.slice(2, -1).split(";").map(Number)) {
    if (code === 38 || code === 48) break; // one of many colors: numbers follow that are no codes
    if (code === 0) [color, bold] = ["", ""];
    else if (code === 1) bold = "bold";
    else if (code === 22) bold = "";
    else if (code === 39) color = "";
    else if (code % 10 < 8 && (code - code % 10 === 30 || code - code % 10 === 90)) color = COLORS[code % 10];
  }
  return { color, bold };
}

// Returns nodes that show the text, and the style of the text that follows.
function styledNodes(text, style) {
  const nodes = [];
  for (const part of text.split(STYLE)) {
    if (STYLE.test(part)) style = styleAfter(style, part);
    else if (part) {
      let node = document.createTextNode(part);
      if (style.color || style.bold) {
        const span = document.createElement("span");
        span.className = `${style.color} ${style.bold}`.trim();
        span.append(node);
        node = span;
      }
      nodes.push(node);
    }
  }
  return [nodes, style];
}

// Returns what a terminal shows of a line: what follows its last carriage return. Carriage returns at
// the end stay, for the text that follows.
function afterReturn(line) {
  let end = line.length;
  while (line[end - 1] === "\r") end--;
  const from = line.slice(0, end).lastIndexOf("\r") + 1;
  const styles = line.slice(0, from).match(new RegExp(STYLE, "g")) ?? [];
  return styles.slice(-MOST_STYLES).join("") + line.slice(from);
}

function withoutReturns(line) {
  return line.replaceAll("\r", "");
}

// What ends a line, moves the cursor to another line, or erases the line.
const MOVE = /(\n|\x1b\[\d{0,3}[ABEF]|\x1b\[2K)/;

// The log as a terminal would show it: of a line with carriage returns, only what follows the last;
// bars that move the cursor up are redrawn. A line has ended when at least as many lines are below it
// as the program has moved the cursor up so far.
// Lines that ended stay untouched, so that a selection in them stays, too.
class LogView {
  constructor(element) {
    this.element = element;
    this.decoder = new TextDecoder();
    this.held = ""; // a sequence that has not ended
    this.top = 0; // the position to which the log was scrolled last
    this.length = 0; // characters of the lines that ended
    this.follow = document.getElementById("follow");
    this.attempt = Number(element.dataset.attempt);
    this.offset = Number(element.dataset.offset);
    this.over = element.hasAttribute("data-over");
    const text = element.textContent;
    this.last = document.createElement("span"); // the lines that have not ended
    this.lines = [""]; // their texts, with sequences
    this.at = 0; // the line of the cursor
    this.depth = 0; // how many lines the cursor was moved up so far
    this.open = ""; // what `last` shows, with sequences
    this.style = { color: "", bold: "" }; // at its begin
    element.replaceChildren(this.last);
    // Who scrolls up reads there; who scrolls to the end again follows.
    element.addEventListener("scroll", () => {
      const hidden = element.scrollHeight - element.scrollTop - element.clientHeight;
      if (hidden < END_PX) this.follow.checked = true;
      else if (element.scrollTop < this.top) this.follow.checked = false;
    });
    this.follow.addEventListener("change", () => this.scroll());
    this.write(text);
  }

  write(text) {
    const whole = this.held + text;
    const partial = whole.slice(-LONGEST_ESCAPE).match(/(?:\r|\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?)?)$/);
    this.held = partial ? partial[0] : "";
    const shown = whole
      .slice(0, whole.length - this.held.length)
      .replace(/\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b\[(?![0-9;:]*m|\d{0,3}[ABEF]|2K)[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-Z\\-~]/g, "")
      .replaceAll("\r\n", "\n");
    for (const [index, part] of shown.split(MOVE).entries()) {
      if (index % 2 === 1) this.move(part);
      else this.lines[this.at] += part;
    }
    const ended = this.lines.splice(0, Math.max(0, this.at - this.depth)).map(afterReturn);
    this.at -= ended.length;
    if (ended.length > 0) this.append(ended.map(withoutReturns).join("\n") + "\n");
    this.lines = this.lines.map((line) => afterReturn(line).slice(-MOST_CHARACTERS));
    const open = this.lines.map(withoutReturns).join("\n");
    if (this.open !== open) this.last.replaceChildren(...styledNodes(open, this.style)[0]);
    this.open = open;
    this.scroll();
  }

  move(piece) {
    const kind = piece.at(-1);
    const count = kind === "\n" ? 1 : Math.min(Number(piece.slice(2, -1) || 1), DEEPEST);
    if (kind === "K") {
      this.lines[this.at] = withoutReturns(afterReturn(`${this.lines[this.at]}\r\0`)).slice(0, -1);
      return;
    }
    if (kind === "A" || kind === "F") {
      this.depth = Math.max(this.depth, count);
      this.at = Math.max(0, this.at - count);
    } else {
      if (kind === "\n" && this.at === this.lines.length - 1) this.lines.push("");
      this.at = Math.min(this.at + count, this.lines.length - 1);
    }
    if (this.lines[this.at] && (kind === "\n" || kind === "E" || kind === "F")) this.lines[this.at] += "\r";
  }

  scroll() {
    if (!this.follow.checked) return;
    this.element.scrollTop = this.element.scrollHeight;
    this.top = this.element.scrollTop;
  }

  append(text) {
    const [nodes, style] = styledNodes(text, this.style);
    this.style = style;
    this.last.before(...nodes);
    this.length += nodes.reduce((sum, each) => sum + each.textContent.length, 0);
    while (this.length > MOST_CHARACTERS || this.element.childNodes.length > MOST_NODES) {
      const first = this.element.firstChild;
      const size = first.textContent.length;
      let surplus = Math.min(size, this.length - MOST_CHARACTERS);
      if (surplus <= 0) surplus = size; // there are too many nodes
      this.length -= surplus;
      if (surplus === size) first.remove();
      else (first.firstChild ?? first).deleteData(0, surplus);
    }
  }

  async update() {
    if (this.over) return;
    const asked = `&attempt=${this.attempt}&offset=${this.offset}`;
    const answer = await ask(this.element.dataset.log + asked);
    if (!answer.ok) return; // the updates of the page tell the reason
    const piece = await answer.json();
    if (piece.attempt !== this.attempt) {
      this.decoder = new TextDecoder();
      this.held = "";
      [this.at, this.depth] = [this.lines.length - 1, 0];
      this.write(`${this.lines[this.at] && "\n"}\x1b[0m— attempt ${piece.attempt} —\n`);
    }
    const bytes = Uint8Array.from(atob(piece.data), (each) => each.charCodeAt(0));
    if (bytes.length > 0) this.write(this.decoder.decode(bytes, { stream: true }));
    [this.attempt, this.offset, this.over] = [piece.attempt, piece.offset, piece.over];
  }
}

document.addEventListener("change", (event) => {
  const { all } = event.target.dataset;
  for (const name of all?.split(" ") ?? []) {
    for (const each of document.getElementsByName(name)) each.checked = event.target.checked;
  }
  if (!event.target.matches("[data-submit]")) return;
  sessionStorage.setItem("focus", event.target.name); // for the page that follows
  event.target.form.submit();
});
document.documentElement.classList.add("scripted");
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy], [data-copies]");
  if (button === null) return;
  const shown = button.dataset.copies ? document.getElementById(button.dataset.copies) : button.previousElementSibling;
  try {
    await navigator.clipboard.writeText(button.dataset.copy ?? shown.textContent);
    button.textContent = "Copied";
  } catch {
    // without TLS, browsers give the clipboard only to loopback addresses
    document.getSelection().selectAllChildren(shown);
    button.textContent = "Press Ctrl+C";
  }
});
document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.confirm ?? event.target.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});
for (const each of document.querySelectorAll("[data-submit]")) {
  if (each.name === sessionStorage.getItem("focus")) each.focus();
}
sessionStorage.removeItem("focus");
showLocalTimes(document);
thinMarks();
addEventListener("resize", thinMarks);
const log = document.getElementById("log");
const view = log === null ? null : new LogView(log);
if (view !== null) repeat(() => view.update(), LOG_MS, IDLE_LOG_MS);
if (content.querySelector("[data-live]")) repeat(updateParts, PART_MS, IDLE_PART_MS);
