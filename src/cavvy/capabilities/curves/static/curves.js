// Draws the curves of a page with uPlot: the server sends as many points as a chart has pixels, of the
// part of the axis that is shown.
"use strict";

{
  const LIVE_MS = 2000; // between two updates of a job that runs
  const IDLE_MS = 120000; // without input after which updates are rarer
  const IDLE_LIVE_MS = 30000;
  const MARKS_MS = 300; // after the first curves, before the marks of several runs are asked for
  const CHART_PX = 200;
  const MOST_LINES = 6; // which have colours of their own
  const MOST_NAMED = 12; // lines that are all named below a chart
  const UNITS = { step: "step", time: "time", cost: "cost" };
  const root = document.getElementById("curve-charts");

  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const state = read();
  const charts = new Map(); // by name
  const runs = JSON.parse(root.dataset.runs || "{}"); // by the label of their line: path, and live
  let marks = [];
  let extent = [Infinity, -Infinity]; // of the curves that are drawn
  let whole = [-Infinity, Infinity]; // the ends of the axis when nothing was zoomed
  let isLive = root.dataset.running === "true";
  let touched = performance.now();
  for (const each of ["pointermove", "keydown", "wheel"]) {
    addEventListener(each, () => (touched = performance.now()), { passive: true });
  }

  function read() {
    const asked = new URLSearchParams(location.search);
    const number = (name) => (asked.has(name) && Number.isFinite(Number(asked.get(name))) ? Number(asked.get(name)) : null);
    return {
      by: asked.get("by") in UNITS ? asked.get("by") : "step",
      log: asked.get("scale") === "log",
      smooth: Math.min(Math.max(number("smooth") ?? 0, 0), 0.99),
      from: number("from"),
      to: number("to"),
      find: asked.get("curve") ?? "",
    };
  }

  // The address shows the view, so that a colleague can open it.
  function keep() {
    const asked = new URLSearchParams(location.search);
    const set = (name, value) => (value ? asked.set(name, value) : asked.delete(name));
    set("by", state.by === "step" ? "" : state.by);
    set("scale", state.log ? "log" : "");
    set("smooth", state.smooth ? String(state.smooth) : "");
    set("from", state.from === null ? "" : String(state.from));
    set("to", state.to === null ? "" : String(state.to));
    set("curve", state.find);
    const query = asked.toString();
    history.replaceState(null, "", location.pathname + (query ? `?${query}` : "") + location.hash);
  }

  function show(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e5 && size < 1e15) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(4)));
  }

  function showX(value) {
    if (value === null || value === undefined) return "";
    if (state.by === "cost") return `$${value < 0.01 ? Number(value.toPrecision(2)) : value.toFixed(2)}`;
    if (state.by === "step") return show(value);
    const seconds = Math.round(value * 10) / 10;
    if (seconds < 120) return `${seconds} s`;
    return seconds < 7200 ? `${Number((seconds / 60).toPrecision(3))} min` : `${Number((seconds / 3600).toPrecision(3))} h`;
  }

  // An exponential mean that is right from the first value on; gaps stay.
  function smooth(values, weight) {
    let [last, count] = [0, 0];
    return values.map((each) => {
      if (each === null || each === undefined) return each;
      last = last * weight + (1 - weight) * each;
      count += 1;
      return last / (1 - weight ** count);
    });
  }

  class Chart {
    constructor(name) {
      this.name = name;
      this.isMachine = name.startsWith("machine/");
      this.lines = null;
      this.isShown = false;
      this.figure = document.createElement("figure");
      this.figure.className = "chart curve-chart";
      const title = document.createElement("figcaption");
      title.textContent = name;
      const save = document.createElement("span");
      save.className = "curve-save";
      for (const kind of ["CSV", "PNG", "SVG"]) {
        const button = document.createElement("button");
        button.type = "button";
        button.className = "quiet";
        button.textContent = kind;
        button.setAttribute("aria-label", `Save ${name} as ${kind}`);
        button.addEventListener("click", () => this.save(kind.toLowerCase()));
        save.append(button);
      }
      this.place = document.createElement("div");
      this.place.setAttribute("role", "img");
      this.place.setAttribute("aria-label", name);
      this.place.style.minHeight = `${CHART_PX + 30}px`;
      this.place.tabIndex = 0;
      this.place.addEventListener("keydown", (pressed) => this.press(pressed));
      this.values = document.createElement("details");
      this.run = document.createElement("p"); // the run that was clicked
      this.run.className = "links";
      this.run.hidden = true;
      this.run.setAttribute("role", "status");
      this.figure.append(title, this.place, this.run, save, this.values);
      this.plot = null;
      this.shape = "";
    }

    take(lines) {
      this.lines = lines;
      if (!this.isMachine) {
        for (const { x } of lines) if (x.length > 0) extent = [Math.min(extent[0], x[0]), Math.max(extent[1], x.at(-1))];
      }
      this.draw();
    }

    series() {
      const tables = this.lines.map((each) => [each.x, each.y, ...(each.low ? [each.low, each.high] : [])]);
      const data = tables.length > 1 ? uPlot.join(tables, tables.map((each) => each.map(() => 1))) : tables[0];
      const series = [{ label: UNITS[state.by], value: (_, each) => showX(each) }];
      const bands = [];
      const values = [data[0]];
      let at = 1;
      for (const [number, line] of this.lines.entries()) {
        const stroke = number < MOST_LINES ? color(`--s${number}`) : color("--s6");
        const own = data[at++];
        if (state.smooth) {
          series.push({ label: `${line.label} as reported`, stroke, width: 1, alpha: 0.25, points: { show: false }, spanGaps: true, value: (_, each) => show(each), class: "hidden-label" });
          values.push(own);
        }
        series.push({
          label: line.label,
          stroke,
          width: number < MOST_LINES ? 1.6 : 1,
          points: { show: line.x.length < 40, size: 4 },
          spanGaps: false,
          value: (_, each) => show(each),
          alpha: number < MOST_LINES ? 1 : 0.5,
          ...(number < MOST_LINES || this.lines.length <= MOST_NAMED ? {} : { class: "hidden-label" }),
        });
        values.push(state.smooth ? smooth(own, state.smooth) : own);
        if (line.low) {
          const [low, high] = [data[at++], data[at++]];
          const end = series.length;
          for (const each of ["lowest", "highest"]) {
            series.push({ label: each, stroke, width: 0.5, alpha: 0.5, points: { show: false }, value: (_, value) => show(value) });
          }
          values.push(low, high);
          bands.push({ series: [end + 1, end], fill: `${stroke}33` });
        }
      }
      return [series, values, bands];
    }

    draw() {
      if (this.lines === null) return;
      const [series, values, bands] = this.series();
      const shape = JSON.stringify([series.map((each) => each.label), state.by, state.log, state.smooth > 0]);
      if (this.plot !== null && this.shape === shape) {
        this.plot.setData(values);
      } else {
        this.plot?.destroy();
        this.shape = shape;
        this.plot = new uPlot(this.options(series, bands), values, this.place);
      }
      this.describe();
    }

    options(series, bands) {
      const axis = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
      return {
        width: Math.max(200, this.figure.clientWidth - 26),
        height: CHART_PX,
        series,
        bands,
        cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "curves" } },
        legend: { live: true },
        scales: { x: { time: false, range: (_, low, high) => this.range(low, high) }, y: state.log ? { distr: 3 } : { range: (_, low, high) => spread(low, high) } },
        axes: [
          { ...axis, values: (_, splits) => splits.map(showX), space: 70 },
          { ...axis, size: 64, values: (_, splits) => splits.map((each) => (each === null ? "" : show(each))) },
        ],
        hooks: {
          setSelect: [
            (plot) => {
              if (plot.select.width < 4) return;
              const ends = [plot.select.left, plot.select.left + plot.select.width].map((each) => plot.posToVal(each, "x"));
              plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
              zoom(...ends);
            },
          ],
          draw: [(plot) => drawMarks(plot)],
          ready: [
            (plot) => {
              plot.over.addEventListener("dblclick", () => zoom(null, null));
              plot.over.addEventListener("click", () => this.choose());
            },
          ],
        },
      };
    }

    // The part of the axis that is shown; charts of machines have the ends of the curves.
    range(low, high) {
      const [first, last] = this.isMachine && extent[0] < extent[1] ? extent : [low ?? 0, high ?? 1];
      return [state.from ?? first, state.to ?? last];
    }

    describe() {
      if (this.values.firstChild === null) {
        const summary = document.createElement("summary");
        summary.textContent = "Values";
        const table = document.createElement("table");
        table.createTHead().innerHTML = "<tr><th scope=col>Line</th><th scope=col>Values</th><th scope=col>Lowest</th><th scope=col>Highest</th><th scope=col>Last</th><th scope=col>Gaps</th></tr>";
        table.createTBody();
        this.values.append(summary, table);
        this.values.addEventListener("toggle", () => this.list());
      }
      if (this.values.open) this.list();
      const last = this.lines[0] ? `, last ${show(this.lines[0].last)}` : "";
      this.place.setAttribute("aria-label", `${this.name}, by ${UNITS[state.by]}${last}`);
    }

    // Fills the table below the chart, which is hidden at first.
    list() {
      const rows = this.lines.map((line) => {
        const row = document.createElement("tr");
        const gaps = line.gaps ? `${line.gaps} not a finite number` : "";
        for (const each of [line.label, line.count.toLocaleString("en"), show(line.lowest), show(line.highest), show(line.last), gaps]) {
          const cell = document.createElement("td");
          cell.textContent = each;
          row.append(cell);
        }
        return row;
      });
      this.values.querySelector("tbody").replaceChildren(...rows);
    }

    // Saves what the chart shows: its points, or its picture.
    async save(kind) {
      if (this.plot === null) return;
      let data;
      if (kind === "csv") data = new Blob([this.toCsv()], { type: "text/csv" });
      else if (kind === "svg") data = new Blob([toSvg(this.plot, this.name)], { type: "image/svg+xml" });
      else data = await toPng(this.plot, this.name);
      const link = document.createElement("a");
      link.href = URL.createObjectURL(data);
      link.download = `${this.name.replace(/[^\w.-]+/g, "_")}.${kind}`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    }

    toCsv() {
      const rows = [["line", UNITS[state.by], "value", "lowest", "highest"]];
      for (const line of this.lines) {
        for (const [at, x] of line.x.entries()) {
          if (line.y[at] !== null) rows.push([line.label, x, line.y[at], line.low?.[at] ?? "", line.high?.[at] ?? ""]);
        }
      }
      return rows.map((row) => row.map(quote).join(",")).join("\r\n") + "\r\n";
    }

    // Names the run whose line is nearest to the pointer, with what can be done with it.
    choose() {
      const { top, idx } = this.plot.cursor;
      if (idx === null || idx === undefined || Object.keys(runs).length === 0) return;
      let [best, nearest] = [null, 30];
      for (const [number, series] of this.plot.series.entries()) {
        const value = this.plot.data[number][idx];
        if (number === 0 || !series.show || !(series.label in runs) || value === null || value === undefined) continue;
        const distance = Math.abs(this.plot.valToPos(value, "y") - top);
        if (distance < nearest) [best, nearest] = [series.label, distance];
      }
      if (best !== null) showRun(this.run, best);
    }

    // Zooms and moves by keys, as dragging does.
    press(pressed) {
      if (this.plot === null || pressed.ctrlKey || pressed.metaKey || pressed.altKey) return;
      const { min, max } = this.plot.scales.x;
      const size = max - min;
      const ends = {
        "+": [min + size / 4, max - size / 4],
        "=": [min + size / 4, max - size / 4],
        "-": [min - size / 2, max + size / 2],
        ArrowLeft: [min - size / 4, max - size / 4],
        ArrowRight: [min + size / 4, max + size / 4],
        0: [null, null],
      }[pressed.key];
      if (!ends || !(size > 0)) return;
      pressed.preventDefault();
      if (state.from === null && state.to === null) whole = [min, max];
      let [from, to] = ends;
      if (from !== null && from <= whole[0] && to >= whole[1]) [from, to] = [null, null];
      else if (from !== null && from < whole[0]) [from, to] = [whole[0], whole[0] + (to - from)];
      else if (from !== null && to > whole[1]) [from, to] = [whole[1] - (to - from), whole[1]];
      zoom(from, to);
    }

    // Shows another part of the axis with the points that are here, until finer ones come.
    move() {
      const [xs] = this.plot?.data ?? [[]];
      if (xs.length > 0) this.plot.setScale("x", { min: xs[0], max: xs.at(-1) }); // `range` cuts it
    }
  }

  function quote(value) {
    let text = String(value);
    if (/^[=+@\t\r-]/.test(text) && Number.isNaN(Number(text))) text = `'${text}`; // no formula of a table program
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  function escape(text) {
    return String(text).replace(/[&<>"]/g, (each) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[each]);
  }

  // The lines of a chart as paths, with the names of the lines and the ends of the axes.
  function toSvg(plot, name) {
    const [left, top, width, height] = [64, 28, plot.over.clientWidth, plot.over.clientHeight];
    const shown = [...plot.series.entries()].filter(([number, each]) => number > 0 && each.show);
    const paths = shown.map(([number, each]) => {
      let pen = "M";
      const points = plot.data[0].map((x, at) => {
        const y = plot.data[number][at];
        if (y === null || y === undefined) return y === null ? ((pen = "M"), "") : "";
        const text = `${pen}${(left + plot.valToPos(x, "x")).toFixed(1)} ${(top + plot.valToPos(y, "y")).toFixed(1)}`;
        pen = "L";
        return text;
      });
      const stroke = typeof each.stroke === "function" ? each.stroke(plot, number) : each.stroke;
      return `<path d="${points.join("")}" fill="none" stroke="${escape(stroke)}" stroke-width="${each.width}" opacity="${each.alpha ?? 1}"/>`;
    });
    const names = shown.slice(0, MOST_NAMED).map(([number, each], at) => {
      const stroke = typeof each.stroke === "function" ? each.stroke(plot, number) : each.stroke;
      return `<text x="${left}" y="${top + height + 40 + 16 * at}" fill="${escape(stroke)}">${escape(each.label)}</text>`;
    });
    const { x, y } = plot.scales;
    const ends = [
      `<text x="${left}" y="${top + height + 18}">${escape(showX(x.min))}</text>`,
      `<text x="${left + width}" y="${top + height + 18}" text-anchor="end">${escape(showX(x.max))}</text>`,
      `<text x="${left - 6}" y="${top + 10}" text-anchor="end">${escape(show(y.max))}</text>`,
      `<text x="${left - 6}" y="${top + height}" text-anchor="end">${escape(show(y.min))}</text>`,
    ];
    const size = `width="${left + width + 16}" height="${top + height + 48 + 16 * names.length}"`;
    const frame = `<rect x="${left}" y="${top}" width="${width}" height="${height}" fill="none" stroke="#8888"/>`;
    const ground = `<rect width="100%" height="100%" fill="${escape(color("--page") || "#fff")}"/>`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="system-ui, sans-serif" font-size="12" fill="${escape(color("--text") || "#222")}">${ground}<text x="${left}" y="18" font-size="14">${escape(name)}</text>${frame}${paths.join("")}${ends.join("")}${names.join("")}</svg>`;
  }

  // The canvas of a chart on the ground of the page, with its name.
  function toPng(plot, name) {
    const from = plot.ctx.canvas;
    const canvas = document.createElement("canvas");
    const head = 28 * devicePixelRatio;
    [canvas.width, canvas.height] = [from.width, from.height + head];
    const context = canvas.getContext("2d");
    context.fillStyle = color("--page") || "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = color("--text") || "#222";
    context.font = `${14 * devicePixelRatio}px system-ui, sans-serif`;
    context.fillText(name, 12 * devicePixelRatio, 19 * devicePixelRatio);
    context.drawImage(from, 0, head);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }

  // A run's name, and a button that stops it.
  function showRun(place, label) {
    const { path, live } = runs[label];
    const link = document.createElement("a");
    link.href = path;
    link.textContent = label;
    place.replaceChildren(link);
    if (live) {
      const form = document.createElement("form");
      [form.method, form.action, form.className] = ["post", `${path}/stop`, "curve-stop"];
      form.dataset.confirm = `Stop the job ${label}?`;
      const button = document.createElement("button");
      [button.className, button.textContent] = ["bad", "Stop"];
      form.append(button);
      place.append(" ", form);
    }
    place.hidden = false;
  }

  function spread(low, high) {
    if (low === null || high === null) return [0, 1];
    const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    return [low - room, high + room];
  }

  function drawMarks(plot) {
    const context = plot.ctx;
    context.save();
    context.strokeStyle = color("--faint");
    context.fillStyle = color("--faint");
    context.setLineDash([4, 4]);
    context.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    let named = -Infinity; // where the last text stands
    for (const { x, text, line } of marks) {
      if (x < plot.scales.x.min || x > plot.scales.x.max) continue;
      if (line) {
        // of a run, in the colour of its line
        const mean = `${line}, mean of `; // of a run with several processes
        const number = plot.series.findIndex((each) => each.label === line || each.label?.startsWith(mean));
        if (number < 1 || !plot.series[number].show) continue;
        context.strokeStyle = context.fillStyle = plot.series[number].stroke(plot, number);
      }
      const at = Math.round(plot.valToPos(x, "x", true));
      context.beginPath();
      context.moveTo(at, plot.bbox.top);
      context.lineTo(at, plot.bbox.top + plot.bbox.height);
      context.stroke();
      if (Math.abs(at - named) < 70 * devicePixelRatio) continue;
      named = at;
      const isRight = at > plot.bbox.left + plot.bbox.width * 0.7;
      context.textAlign = isRight ? "right" : "left";
      context.fillText(text, isRight ? at - 4 : at + 4, plot.bbox.top + 12 * devicePixelRatio);
    }
    context.restore();
  }

  function zoom(from, to) {
    view += 1;
    state.from = from === null ? null : Number(from.toPrecision(8));
    state.to = to === null ? null : Number(to.toPrecision(8));
    refresh(); // the server works while what is here is drawn
    document.getElementById("curve-reset").hidden = state.from === null && state.to === null;
    for (const each of charts.values()) if (each.isShown) each.move();
    keep();
  }

  let asking = null;
  let view = 0; // grows with each change of the axis: answers about an earlier one come too late
  let hasAskedMarks = false;
  // Asks for the charts that are on the screen, or for these. The marks of several runs cost the
  // server more than their curves, so that only some requests ask for them.
  async function refresh(names = null, isMarked = false) {
    const askedIn = view;
    const shown = names ?? [...charts.values()].filter((each) => each.isShown).map((each) => each.name);
    if (names === null) {
      asking?.abort();
      asking = new AbortController();
      for (const each of charts.values()) if (!each.isShown) each.lines = null; // asked for when shown
    }
    const asked = new URLSearchParams(root.dataset.query);
    asked.set("by", state.by);
    if (state.from !== null) asked.set("from", state.from);
    if (state.to !== null) asked.set("to", state.to);
    for (const each of shown) asked.append("curve", each);
    if (isMarked) asked.set("marks", "true");
    try {
      const answer = await fetch(`${root.dataset.source}?${asked}`, names === null ? { signal: asking.signal } : {});
      if (!answer.ok) return;
      const found = await answer.json();
      if (askedIn === view) take(found);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    }
  }

  function take(found) {
    if (found.marks !== null) marks = found.marks;
    else if (!hasAskedMarks) {
      hasAskedMarks = true;
      setTimeout(() => refresh(null, true), MARKS_MS);
    }
    isLive = found.live;
    for (const name of found.names) add(name);
    for (const { name, lines } of found.charts) charts.get(name)?.take(lines);
    root.dataset.ready = "true";
    // for benchmarks; uPlot draws in a microtask, which was queued before this one
    if (found.charts.length > 0) queueMicrotask(() => performance.mark("curves-drawn"));
  }

  const watcher = new IntersectionObserver(
    (entries) => {
      const fresh = [];
      for (const { target, isIntersecting } of entries) {
        const chart = charts.get(target.dataset.name);
        chart.isShown = isIntersecting;
        if (isIntersecting && chart.lines === null) fresh.push(chart.name);
      }
      if (fresh.length > 0) refresh(fresh);
    },
    { rootMargin: "100px" },
  );

  function add(name) {
    if (charts.has(name)) return;
    const chart = new Chart(name);
    chart.figure.dataset.name = name;
    charts.set(name, chart);
    root.append(chart.figure);
    chart.figure.hidden = !name.toLowerCase().includes(state.find.toLowerCase());
    watcher.observe(chart.figure);
  }

  function listen(id, event, act) {
    document.getElementById(id)?.addEventListener(event, (happened) => {
      act(happened.target);
      keep();
    });
  }

  const bar = document.getElementById("curve-bar");
  bar.hidden = false;
  document.getElementById("curve-by").value = state.by;
  document.getElementById("curve-log").checked = state.log;
  document.getElementById("curve-smooth").value = state.smooth;
  document.getElementById("curve-find").value = state.find;
  document.getElementById("curve-reset").hidden = state.from === null && state.to === null;
  listen("curve-by", "change", (each) => {
    [state.by, state.from, state.to] = [each.value, null, null];
    view += 1;
    document.getElementById("curve-reset").hidden = true;
    marks = [];
    extent = [Infinity, -Infinity];
    refresh(null, true);
  });
  const redraw = () => {
    for (const each of charts.values()) each.draw();
  };
  listen("curve-log", "change", (each) => ((state.log = each.checked), redraw()));
  listen("curve-smooth", "input", (each) => ((state.smooth = Number(each.value)), redraw()));
  listen("curve-find", "input", (each) => {
    state.find = each.value;
    for (const chart of charts.values()) chart.figure.hidden = !chart.name.toLowerCase().includes(state.find.toLowerCase());
  });
  listen("curve-reset", "click", () => zoom(null, null));
  addEventListener("resize", () => {
    for (const each of charts.values()) each.plot?.setSize({ width: Math.max(200, each.figure.clientWidth - 26), height: CHART_PX });
  });
  for (const name of JSON.parse(root.dataset.names)) add(name);
  if (root.dataset.first) {
    take(JSON.parse(root.dataset.first)); // the page has brought what is drawn first
    delete root.dataset.first;
  }

  (async () => {
    let last = performance.now();
    for (;;) {
      await new Promise((done) => setTimeout(done, LIVE_MS));
      const now = performance.now();
      if (!isLive || document.hidden || (now - touched > IDLE_MS && now - last < IDLE_LIVE_MS)) continue;
      last = now;
      await refresh(null, true).catch(() => {}); // the updates of the page tell the reason
    }
  })();
}
