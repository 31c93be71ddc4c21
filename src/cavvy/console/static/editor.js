// The editor of a task file: numbers its lines, checks it while it is written, and completes keys.
"use strict";

const CHECK_MS = 500; // between the last keystroke and the check
const FORM_MS = 120; // between the last change of a field and the request
const MOST_BYTES = 256 << 10; // of a task file
const MOST_SHOWN = 12; // completions

const field = document.getElementById("text");
const form = document.getElementById("editor");
const gutter = document.getElementById("gutter");
const menu = document.getElementById("completions");
const answer = document.getElementById("answer");
const fields = document.getElementById("task-form"); // null if the file cannot be changed by fields
let keys = null; // by the path of the mapping: [name, meaning, values]
let chosen = -1; // the completion that Enter takes
let waiting = 0; // the timer of the check

function showNumbers() {
  const wrong = new Set([...answer.querySelectorAll("[data-line]")].map((each) => Number(each.dataset.line)));
  const count = field.value.split("\n").length;
  gutter.replaceChildren();
  for (let line = 1; line <= count; line++) {
    const number = document.createElement("span");
    number.textContent = `${line}\n`;
    if (wrong.has(line)) number.className = "wrong";
    gutter.append(number);
  }
  gutter.scrollTop = field.scrollTop;
}

let asked = 0; // checks and changes: an earlier answer comes too late

// Asks to check the file, or with "form" to change it as the fields say and to rank the offers.
async function check(action = "check") {
  const [text, number] = [field.value, ++asked];
  const body = new URLSearchParams(new FormData(form));
  body.set("do", action);
  const page = await fetch("/submit", { method: "POST", body, redirect: "manual" });
  if (!page.ok || field.value !== text || number !== asked) return; // a later check follows
  const made = new DOMParser().parseFromString(await page.text(), "text/html");
  const fresh = made.getElementById("answer");
  if (fresh === null) return;
  updatePart(answer, fresh);
  if (action === "form") field.value = made.getElementById("text").value;
  else showFields(made.getElementById("task-form"));
  field.toggleAttribute("aria-invalid", answer.querySelector("[data-line]") !== null);
  showNumbers();
}

// Shows in the fields what the file says now.
function showFields(made) {
  for (const each of fields?.querySelectorAll("[name]") ?? []) {
    const fresh = made?.querySelector(`[name="${each.name}"]`);
    if (fresh && each !== document.activeElement) each.value = fresh.value;
  }
}

function checkSoon() {
  showNumbers();
  clearTimeout(waiting);
  waiting = setTimeout(() => check().catch(() => null), CHECK_MS);
}

// Returns the path of the mapping in which the cursor is, the text of the key or value before the
// cursor, and the key whose value it is, or "".
function placeOfCursor() {
  const before = field.value.slice(0, field.selectionStart).split("\n");
  const line = before.pop();
  const parts = line.match(/^(\s*(?:- +)*)(?:([\w-]+):[ \t]+)?(\S*)$/);
  if (parts === null) return null;
  let depth = parts[1].length;
  const path = [];
  for (const each of before.reverse()) {
    const key = each.match(/^(\s*(?:- +)*)([\w-]+):/);
    if (key === null || key[1].length >= depth) continue;
    path.unshift(key[2]);
    depth = key[1].length;
  }
  return { path: path.join("."), key: parts[2] ?? "", typed: parts[3] };
}

function hideMenu() {
  menu.hidden = true;
  chosen = -1;
  field.removeAttribute("aria-activedescendant");
}

function showMenu(always) {
  const place = keys === null ? null : placeOfCursor();
  const here = place === null ? [] : (keys[place.path] ?? []);
  const known = here.find(([name]) => name === place.key);
  const offered = !place ? [] : place.key ? (known?.[2] ?? []).map((each) => [each, ""]) : here;
  const found = offered.filter(([name]) => name.startsWith(place.typed) && name !== place.typed);
  if (found.length === 0 || !(always || place.typed)) return hideMenu();
  menu.replaceChildren();
  for (const [index, [name, meaning]] of found.slice(0, MOST_SHOWN).entries()) {
    const item = document.createElement("li");
    item.id = `completion-${index}`;
    item.setAttribute("role", "option");
    const title = document.createElement("code");
    title.textContent = name;
    item.append(title, ` ${meaning}`);
    item.dataset.text = name.slice(place.typed.length) + (place.key ? "" : ": ");
    menu.append(item);
  }
  menu.hidden = false;
  choose(always ? 0 : -1);
}

function choose(index) {
  chosen = index;
  for (const [at, item] of [...menu.children].entries()) {
    item.setAttribute("aria-selected", String(at === index));
    if (at === index) item.scrollIntoView({ block: "nearest" });
  }
  if (index >= 0) field.setAttribute("aria-activedescendant", `completion-${index}`);
}

function take(item) {
  field.focus();
  field.setRangeText(item.dataset.text, field.selectionStart, field.selectionStart, "end");
  hideMenu();
  checkSoon();
}

field.addEventListener("input", () => {
  checkSoon();
  showMenu(false);
});
field.addEventListener("scroll", () => (gutter.scrollTop = field.scrollTop));
field.addEventListener("blur", hideMenu);
field.addEventListener("keydown", (event) => {
  if (event.key === " " && event.ctrlKey) {
    event.preventDefault();
    return showMenu(true);
  }
  if (event.key === "Enter" && event.ctrlKey) return form.requestSubmit(form.querySelector("[value=plan]"));
  if (menu.hidden) return;
  const count = menu.children.length;
  if (event.key === "ArrowDown") choose((chosen + 1) % count);
  else if (event.key === "ArrowUp") choose((chosen - 1 + count) % count);
  else if (event.key === "Escape") hideMenu();
  else if ((event.key === "Enter" || event.key === "Tab") && chosen >= 0) take(menu.children[chosen]);
  else return;
  event.preventDefault();
});
menu.addEventListener("mousedown", (event) => {
  const item = event.target.closest("li");
  event.preventDefault(); // the field keeps the focus
  if (item !== null) take(item);
});
fields?.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => check("form").catch(() => null), FORM_MS);
});
document.getElementById("open-file")?.addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (file === undefined) return;
  if (file.size > MOST_BYTES) {
    target.setCustomValidity(`A task file has at most ${MOST_BYTES.toLocaleString("en")} bytes.`);
    return target.reportValidity();
  }
  target.setCustomValidity("");
  field.value = await file.text();
  showNumbers();
  await check().catch(() => null);
  field.focus();
});
answer.addEventListener("input", checkSoon);
answer.addEventListener("click", (event) => {
  const problem = event.target.closest("[data-line]");
  if (problem === null || !event.target.matches("a")) return;
  event.preventDefault();
  const lines = field.value.split("\n").slice(0, Number(problem.dataset.line) - 1);
  const at = lines.reduce((sum, each) => sum + each.length + 1, 0) + Number(problem.dataset.column) - 1;
  field.focus();
  field.setSelectionRange(at, at);
});
showNumbers();
ask(field.dataset.keys)
  .then((reply) => reply.json())
  .then((found) => (keys = found))
  .catch(() => null);
