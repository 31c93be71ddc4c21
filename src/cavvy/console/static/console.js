// Keeps the page current: replaces the parts marked data-live, appends to the log, and shows times in
// the browser's time zone.
"use strict";

const PART_MS = 3000; // between two updates of the page
const LOG_MS = 1000; // between two updates of the log
const MOST_CHARACTERS = 4e6; // of the log; older lines are dropped

const silence = document.getElementById("silence");
const content = document.getElementById("content");

function tell(text) {
  silence.textContent = text;
  silence.hidden = text === "";
}

function showLocalTimes(part) {
  for (const each of part.querySelectorAll("time")) {
    const local = new Date(each.dateTime).toLocaleString();
    if (each.hasAttribute("data-local")) each.textContent = local;
    else each.title = local;
  }
}

// A reader who selects text or uses a control must not lose it.
function isInUse(part) {
  const selection = document.getSelection();
  return part.contains(document.activeElement) && document.activeElement !== part ||
    selection !== null && !selection.isCollapsed && part.contains(selection.anchorNode);
}

function replacePart(old, fresh) {
  if (old.dataset.seen === fresh.innerHTML || isInUse(old)) return;
  const open = new Set([...old.querySelectorAll("details[open]")].map((each) => each.id));
  const before = fresh.innerHTML;
  for (const each of fresh.querySelectorAll("details")) each.open = open.has(each.id);
  showLocalTimes(fresh);
  old.replaceChildren(...fresh.childNodes);
  old.dataset.seen = before;
}

async function updateParts() {
  const answer = await fetch(location.pathname + location.search, { redirect: "manual" });
  if (answer.type === "opaqueredirect") return location.reload(); // to sign in again
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (!answer.ok) {
    const notice = page.querySelector("main .notice");
    return tell(`This page is not current. ${notice ? notice.textContent : answer.statusText}`);
  }
  tell("");
  for (const old of document.querySelectorAll("[data-live]")) {
    const fresh = page.getElementById(old.id);
    if (fresh !== null) replacePart(old, fresh);
  }
}

async function repeat(act, pause) {
  for (let more = true; more !== false;) {
    await new Promise((done) => setTimeout(done, pause));
    if (document.hidden) continue;
    try {
      more = await act();
    } catch {
      tell("No answer from the console. This page is not current; retrying.");
    }
  }
}

// A terminal would show only what follows the last carriage return of a line.
class LogView {
  constructor(element) {
    this.element = element;
    this.decoder = new TextDecoder();
    this.text = "";
    this.held = "";
    this.follow = document.getElementById("follow");
    this.attempt = Number(element.dataset.attempt);
    this.offset = Number(element.dataset.offset);
    this.over = element.hasAttribute("data-over");
    const text = element.textContent;
    element.textContent = "";
    this.write(text);
  }

  write(text) {
    const whole = this.held + text;
    const partial = whole.match(/(?:\r|\x1b[^a-zA-Z]{0,40})$/);
    this.held = partial ? partial[0] : "";
    let shown = whole.slice(0, whole.length - this.held.length);
    shown = shown.replace(/\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]/g, "");
    const from = this.text.lastIndexOf("\n") + 1;
    const lines = (this.text.slice(from) + shown).replaceAll("\r\n", "\n");
    this.text = this.text.slice(0, from) + lines.replace(/[^\n]*\r/g, "");
    if (this.text.length > MOST_CHARACTERS) {
      this.text = this.text.slice(this.text.indexOf("\n", this.text.length - MOST_CHARACTERS / 2) + 1);
    }
    this.element.textContent = this.text;
    if (this.follow !== null && this.follow.checked) {
      this.element.scrollTop = this.element.scrollHeight;
    }
  }

  async update() {
    if (this.over) return false;
    const asked = `&attempt=${this.attempt}&offset=${this.offset}`;
    const answer = await fetch(this.element.dataset.log + asked, { redirect: "manual" });
    if (!answer.ok) return true; // the other updates tell the reason
    const piece = await answer.json();
    const bytes = Uint8Array.from(atob(piece.data), (each) => each.charCodeAt(0));
    if (bytes.length > 0) this.write(this.decoder.decode(bytes, { stream: true }));
    [this.attempt, this.offset, this.over] = [piece.attempt, piece.offset, piece.over];
    return !this.over;
  }
}

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit]")) event.target.form.submit();
});
document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});
showLocalTimes(document);
const log = document.getElementById("log");
if (log !== null) {
  const view = new LogView(log);
  repeat(() => view.update(), LOG_MS);
}
if (content.querySelector("[data-live]")) repeat(updateParts, PART_MS);
