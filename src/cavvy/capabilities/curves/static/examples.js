// Shows the pictures, sound, texts, tables and histograms of a job, with a slider over the steps of
// each. What programs have written is only ever text here, never markup.
"use strict";

{
  const LIVE_MS = 5000;
  const MOST_PX = 24; // the least width of a small picture, which is shown larger
  const root = document.getElementById("examples");
  const source = root.dataset.source;
  const shown = new Map(); // by kind and name
  const SVG = "http://www.w3.org/2000/svg";

  function make(name, text, attributes = {}) {
    const element = document.createElement(name);
    if (text) element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }

  function showTable({ columns, rows }) {
    const table = make("table");
    const head = table.createTHead().insertRow();
    for (const each of columns) head.append(make("th", each, { scope: "col" }));
    const body = table.createTBody();
    for (const row of rows) {
      const line = body.insertRow();
      for (const each of row) line.insertCell().textContent = each;
    }
    return table;
  }

  function showHistogram({ edges, counts }, label) {
    const [width, height, most] = [300, 100, Math.max(...counts, 0) || 1];
    const [low, high] = [edges[0], edges.at(-1)];
    const across = (each) => (high > low ? ((each - low) / (high - low)) * width : 0);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height + 16}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${label}: from ${low} to ${high}, at most ${most} in a bin`);
    const add = (name, attributes, text = "") => {
      const element = document.createElementNS(SVG, name);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      element.textContent = text;
      svg.append(element);
    };
    for (const [at, count] of counts.entries()) {
      const tall = (count / most) * height;
      const wide = high > low ? across(edges[at + 1]) - across(edges[at]) : width;
      add("rect", { x: across(edges[at]), y: height - tall, width: Math.max(0.5, wide - 0.5), height: tall });
    }
    const show = (each) => String(Number(each.toPrecision(4)));
    add("text", { x: 0, y: height + 13 }, show(low));
    add("text", { x: width, y: height + 13, "text-anchor": "end" }, show(high));
    return svg;
  }

  class Series {
    constructor(figure) {
      this.figure = figure;
      this.place = figure.querySelector(".example-shown");
      this.hint = figure.querySelector(".hint");
      this.kind = figure.dataset.kind;
      this.name = figure.dataset.name;
      this.slider = make("input", "", { type: "range", min: "0", step: "1", "aria-label": `Step of ${this.name}` });
      this.slider.addEventListener("input", () => this.show());
      figure.append(this.slider);
      this.ids = [];
    }

    take(ids, labels) {
      const wasLast = this.ids.length === 0 || Number(this.slider.value) === this.ids.length - 1;
      const before = this.ids[Number(this.slider.value)];
      [this.ids, this.labels] = [ids, labels];
      this.slider.max = String(ids.length - 1);
      this.slider.value = String(wasLast ? ids.length - 1 : Math.max(0, ids.indexOf(before)));
      this.slider.hidden = ids.length < 2;
      if (this.ids[Number(this.slider.value)] !== before) this.show();
    }

    async show() {
      const at = Number(this.slider.value);
      const [id, label] = [this.ids[at], this.labels[at]];
      this.hint.textContent = label;
      this.slider.setAttribute("aria-valuetext", label);
      const address = `${source}/${encodeURIComponent(id)}`;
      const text = `${this.name}, ${label}`;
      if (this.kind === "image") {
        const picture = new Image();
        picture.alt = text;
        picture.src = address;
        await picture.decode().catch(() => null);
        if (picture.naturalWidth && picture.naturalWidth <= 4 * MOST_PX) picture.width = 4 * picture.naturalWidth;
        return this.put(id, picture);
      }
      if (this.kind === "audio") return this.put(id, make("audio", "", { controls: "", preload: "none", src: address }));
      const answer = await fetch(address);
      if (!answer.ok) return;
      if (this.kind === "text") return this.put(id, make("pre", await answer.text()));
      const found = await answer.json();
      this.put(id, this.kind === "table" ? showTable(found) : showHistogram(found, text));
    }

    put(id, element) {
      if (this.ids[Number(this.slider.value)] === id) this.place.replaceChildren(element); // else it is late
    }
  }

  function add(name, kind) {
    const figure = make("figure", "", { class: "chart example", "data-name": name, "data-kind": kind });
    const caption = make("figcaption", `${name} `);
    caption.append(make("span", "", { class: "hint" }));
    figure.append(caption, make("div", "", { class: "example-shown", tabindex: "0", role: "group", "aria-label": name }));
    root.append(figure);
    return figure;
  }

  function take(found) {
    for (const { name, kind, ids, labels } of found) {
      const key = `${kind} ${name}`;
      if (!shown.has(key)) shown.set(key, new Series(add(name, kind)));
      shown.get(key).take(ids, labels);
    }
  }

  for (const figure of root.querySelectorAll("figure")) {
    const series = new Series(figure);
    shown.set(`${series.kind} ${series.name}`, series);
    series.take(JSON.parse(figure.dataset.ids), JSON.parse(figure.dataset.labels));
  }
  root.dataset.ready = "true";

  if (root.dataset.running === "true") {
    setInterval(async () => {
      if (document.hidden) return;
      const answer = await fetch(source).catch(() => null);
      if (answer?.ok) take(await answer.json());
    }, LIVE_MS);
  }
}
